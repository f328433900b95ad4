"""Binds every op of a dense decoder to a leaf: once, at construction, from static facts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace

from pagedctl.errors import Fault, NumericsRefused
from pagedctl.models.spec import ModelSpec
from pagedctl.numerics.logprob_order import parse_logprob_order
from pagedctl.numerics.resolution import Numerics
from pagedctl_kernels import sites
from pagedctl_kernels.leaf import BATCH_INVARIANT, DETERMINISTIC, CallSite, Requirement
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.order import arithmetic_id
from pagedctl_kernels.plan import LeafBroken, Plan, plan
from pagedctl_kernels.registry import NoLeafError, Registry


@dataclass(frozen=True, kw_only=True)
class DecoderPlans:
    """The bound leaves of one decoder; ``attention`` has one per distinct window of its layers."""

    embedding: Plan
    norm: Plan
    qkv_proj: Plan
    qk_norm_rope_write: Plan
    attention: Mapping[int | None, Plan]
    o_proj: Plan
    gate_up_proj: Plan
    silu_mul: Plan
    down_proj: Plan
    head: Plan
    logit_edits: Plan
    sample: Plan
    logprob: Plan
    block_sumexp: Plan

    def all(self) -> Iterator[Plan]:
        """Every plan, in the order in which a token meets them."""
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, Plan):
                yield value
            else:
                yield from value.values()

    def leaves(self) -> dict[str, str]:
        """Call site to leaf name, for the manifest."""
        return {_site_text(bound.site): bound.leaf.name for bound in self.all()}

    @property
    def arithmetic_id(self) -> str:
        return arithmetic_id(bound.order for bound in self.all())


def bind_plans(
    spec: ModelSpec,
    numerics: Numerics,
    *,
    block_size: int,
    kv_dtype: str,
    machine: Machine,
    registry: Registry,
    leaves: Mapping[str, tuple[str, ...]] | None = None,
    tried_elements: int | None = None,
) -> DecoderPlans:
    """Select and bind a leaf for every call site of the model under the contract.

    ``leaves`` narrows the candidates of an op to the leaves of these names. With
    ``tried_elements``, leaves check themselves on so much of a weight only: such plans are to
    be looked at, not to be run.
    Raises NumericsRefused that lists, for each site without a leaf, every candidate and the
    reason why it was refused.
    """
    binder = _Binder(numerics, machine, registry, leaves or {}, tried_elements)
    windows = {f"attention {window}": window for window in dict.fromkeys(spec.windows)}
    attention = {
        name: _attention_site(spec, numerics, block_size, kv_dtype, window)
        for name, window in windows.items()
    }
    found = binder.bind_all({**_sites(spec, numerics, block_size, kv_dtype), **attention})
    if binder.faults:
        raise NumericsRefused.of(binder.faults)
    bound = {name: one for name, one in found.items() if one is not None}
    return DecoderPlans(
        attention={window: bound.pop(name) for name, window in windows.items()}, **bound
    )


class _Binder:
    """Binds sites and collects the refusals of all of them."""

    def __init__(
        self,
        numerics: Numerics,
        machine: Machine,
        registry: Registry,
        leaves: Mapping[str, tuple[str, ...]],
        tried_elements: int | None,
    ) -> None:
        self.leaves = leaves
        self.tried_elements = tried_elements
        self.machine = machine
        self.registry = registry
        self.contract = numerics.contract.name
        self.requirement = Requirement(features=required_features(numerics))
        self.faults: list[Fault] = []

    def bind_all(self, sites_by_name: Mapping[str, CallSite]) -> dict[str, Plan | None]:
        """Bind every site; an op whose leaf is unfit at one site takes the next at all of them.

        A leaf may prove unfit for one output width alone. Falling back there only would give
        fused and separate projections different orders.
        """
        bound = {name: self.bind(site) for name, site in sites_by_name.items()}
        for op in dict.fromkeys(site.op for site in sites_by_name.values()):
            own = {name: one for name, one in bound.items() if one and one.site.op == op}
            if len({one.leaf.name for one in own.values()}) > 1:
                bound.update(self._by_one_leaf(own))
        return bound

    def _by_one_leaf(self, own: Mapping[str, Plan]) -> Mapping[str, Plan | None]:
        """The sites of one op, bound to the best leaf that none of them found unfit.

        Each plan keeps the standings that its candidates had before.
        """
        found: dict[str, Plan | None] = {}
        before = len(self.faults)
        for leaf in _unrefused(own.values()):
            del self.faults[before:]
            found = {name: self.bind(one.site, names=(leaf,)) for name, one in own.items()}
            if len(self.faults) == before:
                break
        return {name: _as_judged(own[name], one) for name, one in found.items()}

    def bind(self, site: CallSite, names: tuple[str, ...] | None = None) -> Plan | None:
        requirement = replace(self.requirement, names=names or self.leaves.get(site.op))
        try:
            trial = trial_site(site, self.tried_elements)
            return plan(self.registry, site, self.machine, requirement, trial=trial)
        except LeafBroken as error:
            self.faults.append(
                Fault(
                    what=str(error),
                    where=f"call site {site.name}",
                    rule="a leaf's entry is module:function, which returns the implementation",
                    remedy="mend or uninstall the plug-in that offers it",
                )
            )
            return None
        except NoLeafError as error:
            self.faults.append(
                Fault(
                    what="\n".join(error.lines()),
                    where=f"call site {site.name}",
                    rule=f"the contract {self.contract} needs a leaf at every call site",
                    remedy=self._remedy(site),
                )
            )
            return None

    def _remedy(self, site: CallSite) -> str:
        drop = f"drop --leaf {site.op}; or " if site.op in self.leaves else ""
        return f"{drop}see pagedctl env; use another dtype or device, or --numerics fast"


def _unrefused(plans: Collection[Plan]) -> list[str]:
    """The leaves that no plan saw refused, best first; if there is none, those that serve."""
    refused = {one.leaf.name for plan in plans for one in plan.candidates if one.refusals}
    ranked = sorted(
        {one.leaf for plan in plans for one in plan.candidates},
        key=lambda leaf: (-leaf.priority, leaf.name),
    )
    left = [leaf.name for leaf in ranked if leaf.name not in refused]
    return left or [one.leaf.name for one in plans]


def _as_judged(before: Plan, after: Plan | None) -> Plan | None:
    """*after* with the standing that its candidates had before the op was held to one leaf."""
    return None if after is None else replace(after, candidates=before.candidates)


def trial_site(site: CallSite, elements: int | None) -> CallSite:
    """*site* with a weight [n, k] of at most *elements*; no order depends on n."""
    if elements is None or "n" not in site.facts:
        return site
    n, k = site.facts["n"], site.facts["k"]
    assert isinstance(n, int)
    assert isinstance(k, int)
    return replace(site, facts={**site.facts, "n": min(n, max(elements // k, 1))})


def required_features(numerics: Numerics) -> frozenset[str]:
    """What a leaf must affirm under the resolved switches."""
    wanted = {
        DETERMINISTIC: numerics["deterministic_kernels"],
        BATCH_INVARIANT: numerics["batch_invariant"],
    }
    return frozenset(feature for feature, on in wanted.items() if on)


def _sites(
    spec: ModelSpec, numerics: Numerics, block_size: int, kv_dtype: str
) -> dict[str, CallSite]:
    dtype, hidden = spec.dtype, spec.hidden_size
    qkv_rows = spec.q_size + 2 * spec.kv_size
    order = parse_logprob_order(str(numerics["logprob_order"]))
    return {
        "embedding": sites.embedding_site(
            "embed_tokens", vocab_size=spec.input_vocab_size, width=hidden, dtype=dtype
        ),
        "norm": sites.rms_norm_site(
            "norm",
            width=hidden,
            eps=spec.rms_norm_eps,
            dtype=dtype,
            norm_cast=str(numerics["norm_cast"]),
        ),
        "qkv_proj": sites.gemm_site(
            "qkv_proj", k=hidden, n=qkv_rows, dtype=dtype, bias=spec.attention_bias
        ),
        "qk_norm_rope_write": sites.qk_norm_rope_write_site(
            "qk_norm_rope_write",
            q_heads=spec.num_attention_heads,
            kv_heads=spec.num_key_value_heads,
            head_dim=spec.head_dim,
            rotary_dim=spec.rope.rotary_dim,
            block_size=block_size,
            dtype=dtype,
            kv_dtype=kv_dtype,
            qk_norm=spec.qk_norm,
            eps=spec.rms_norm_eps,
            norm_cast=str(numerics["norm_cast"]),
            rope_table_dtype=str(numerics["rope_table_dtype"]),
            **_yarn_devices(spec, numerics),
        ),
        "o_proj": sites.gemm_site(
            "o_proj", k=spec.q_size, n=hidden, dtype=dtype, bias=spec.o_proj_bias
        ),
        "gate_up_proj": sites.gemm_site(
            "gate_up_proj",
            k=hidden,
            n=2 * spec.intermediate_size,
            dtype=dtype,
            bias=spec.mlp_bias,
        ),
        "silu_mul": sites.silu_mul_site(
            "silu_mul",
            width=spec.intermediate_size,
            dtype=dtype,
            activation_rounding=str(numerics["activation_rounding"]),
        ),
        "down_proj": sites.gemm_site(
            "down_proj", k=spec.intermediate_size, n=hidden, dtype=dtype, bias=spec.mlp_bias
        ),
        "head": sites.head_site(
            "lm_head",
            k=hidden,
            n=spec.output_vocab_size,
            dtype=dtype,
            head_dtype=str(numerics["head_dtype"]),
        ),
        "logit_edits": sites.logit_edits_site("logit_edits", dtype=dtype),
        "sample": sites.sample_site(
            "sample", dtype=dtype, temperature_form=str(numerics["temperature_form"])
        ),
        "logprob": sites.logprob_site(
            "logprob",
            dtype=dtype,
            form=order.form,
            block_size=order.block_size,
            temperature_form=str(numerics["temperature_form"]),
        ),
        "block_sumexp": sites.block_sumexp_site(
            "block_sumexp", dtype=dtype, block_size=order.block_size
        ),
    }


def _yarn_devices(spec: ModelSpec, numerics: Numerics) -> dict[str, str]:
    """The switches that concern YaRN alone: another rope has one form, and one order."""
    if spec.rope.type != "yarn":
        return {}
    names = ("yarn_ramp_mask_device", "yarn_frequency_device")
    return {name: str(numerics[name]) for name in names}


def _attention_site(
    spec: ModelSpec, numerics: Numerics, block_size: int, kv_dtype: str, window: int | None
) -> CallSite:
    return sites.attention_site(
        "attention" if window is None else f"attention window {window}",
        q_heads=spec.num_attention_heads,
        kv_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        block_size=block_size,
        dtype=spec.dtype,
        kv_dtype=kv_dtype,
        window=window,
        softmax_p_dtype=str(numerics["softmax_p_dtype"]),
    )


def _site_text(site: CallSite) -> str:
    """A call site as manifests name it: ``gemm qkv_proj 4096x6144``, or ``attention``."""
    if "k" in site.facts and "n" in site.facts:
        return f"{site.op} {site.name} {site.facts['k']}x{site.facts['n']}"
    return site.name if site.name.startswith(site.op) else f"{site.op} {site.name}"
