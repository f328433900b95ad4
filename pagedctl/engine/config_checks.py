"""What a configuration may not ask of this version, or of this model. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from pagedctl.config.engine_config import EngineConfig
from pagedctl.errors import ConfigError, Fault, NumericsRefused, nearest
from pagedctl.models.spec import ModelSpec
from pagedctl.numerics.logprob_order import parse_logprob_order
from pagedctl_kernels.registry import Registry

CAPPED_BY_POOL = "derived: pool"
"""The origin of a max_model_len that the pool lowered."""

LATER: Mapping[str, tuple[tuple[object, ...], str]] = {
    "tp": ((1,), "it is 1"),
    "tp_layout": ((None,), "it is not given: tp is 1"),
    "reduce_dtype": (("model",), "it is model: tp is 1"),
    "expert_parallel": ((None,), "it is not given"),
    "redundant_experts": ((0,), "it is 0"),
    "device": (("auto", "cpu"), "the engine runs on the CPU"),
    "topology_invariant": ((None, False), "it is off: tp is 1"),
    "swap_memory_bytes": ((None,), "it is not given"),
}
"""Options whose other values come later: the values of this version, and the rule in words."""


def refuse_later(config: EngineConfig) -> EngineConfig:
    """Refuse what this version lacks, all of it at once, rather than ignore it."""
    rules = {
        name: rule for name, (values, rule) in LATER.items() if getattr(config, name) not in values
    }
    if rules:
        raise not_available(config, rules)
    return config


def not_available(config: EngineConfig, rules: Mapping[str, str]) -> ConfigError:
    """The refusal of options by name, each with the place that set it and this version's rule."""
    return ConfigError.of(
        Fault(
            what=f"{name} {getattr(config, name)} is not available in this version",
            where=f"option {name}, set by {config.origins[name]}",
            rule=f"in this version {rule}",
            remedy=f"leave {name} out",
        )
        for name, rule in rules.items()
    )


def check_kv_dtype(config: EngineConfig, spec: ModelSpec) -> None:
    """Keys and values are kept in the model's dtype, or narrowed to one of the same range.

    A key that overflows would hide its token rather than fail the request.
    """
    narrower = ("bfloat16",) if spec.dtype == "float32" else ()
    if config.kv_dtype not in (spec.dtype, *narrower):
        served = " or ".join((spec.dtype, *narrower))
        raise ConfigError(
            f"kv_dtype {config.kv_dtype} does not go with a {spec.dtype} model",
            where=f"option kv_dtype, set by {config.origins['kv_dtype']}",
            rule=f"keys and values of a {spec.dtype} model are kept in {served}",
            remedy=f"use --kv-dtype {spec.dtype}, or auto",
        )


def check_checkpoint(spec: ModelSpec, config: EngineConfig) -> None:
    """What the contract asks of a model; raises NumericsRefused with every broken rule."""
    check_logprob_width(spec, config)
    faults = config.contract.contract.checkpoint_faults(spec, config.contract)
    if faults:
        raise NumericsRefused.of(faults)


def chosen_leaves(config: EngineConfig, registry: Registry) -> dict[str, tuple[str, ...]]:
    """Op to the leaves that --leaf allows it; raises ConfigError for names that do not exist."""
    chosen: dict[str, list[str]] = {}
    faults = []
    for text in config.leaf:
        op, _, name = text.partition("=")
        known = tuple(leaf.name for leaf in registry.leaves(op))
        if name in known:
            chosen.setdefault(op, []).append(name)
        else:
            faults.append(_unknown_leaf(text, op, name, known, registry, config))
    if faults:
        raise ConfigError.of(faults)
    return {op: tuple(names) for op, names in chosen.items()}


def _unknown_leaf(
    text: str,
    op: str,
    name: str,
    known: tuple[str, ...],
    registry: Registry,
    config: EngineConfig,
) -> Fault:
    ops = registry.ops()
    what = f"no leaf of op {op} is called {name}" if known else f"there is no op {op}"
    close = nearest(name, known) if known else nearest(op, ops)
    return Fault(
        what=what,
        where=f"option leaf {text}, set by {config.origins['leaf']}",
        rule=f"one of {', '.join(known or ops)}",
        remedy=f"did you mean {close}?" if close else "see --explain-numerics for the candidates",
    )


def check_logprob_width(spec: ModelSpec, config: EngineConfig) -> None:
    """An explicit block width must divide the (padded) vocabulary; raises NumericsRefused.

    A width of a trainer's shard that does not divide it would fold other blocks than the
    trainer does. The default width has a ragged last block and fits every vocabulary.
    """
    padded = config.contract["padded_vocab_size"]
    vocab = spec.output_vocab_size if padded is None else int(padded)
    faults = []
    if vocab < spec.output_vocab_size:
        faults.append(
            Fault(
                what=f"padded_vocab_size {vocab} is below the vocabulary",
                where=f"option padded_vocab_size, set by {config.origins['padded_vocab_size']}",
                rule=f"at least the model's {spec.output_vocab_size}",
                remedy="give the trainer's padded size, or leave it out",
            )
        )
    settings = config.contract.settings
    order = parse_logprob_order(str(settings["logprob_order"].value))
    if order.explicit and vocab % order.block_size:
        faults.append(
            Fault(
                what=f"block width {order.block_size} leaves {vocab % order.block_size} columns",
                where=f"option logprob_order, set by {settings['logprob_order'].set_by}",
                rule=f"an explicit width divides the (padded) vocabulary of {vocab}",
                remedy="give the trainer's shard width, or the order without a width",
            )
        )
    if faults:
        raise NumericsRefused.of(faults)


def position_warnings(config: EngineConfig, spec: ModelSpec) -> list[tuple[str, str, str]]:
    """(code, where, text) of what a run should know of its lengths before it starts."""
    cap = config.max_model_len
    if cap is None or cap <= spec.max_position_embeddings:
        return []
    text = f"max_model_len {cap} is beyond the model's {spec.max_position_embeddings} positions"
    return [("beyond_positions", "option max_model_len", text)]
