"""The model of an engine: resolved, bound to leaves under the contract, then loaded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from pagedctl.config.engine_config import EngineConfig
from pagedctl.config.groups import ContractOptions, ModelOptions
from pagedctl.config.options import options_of
from pagedctl.engine.config_checks import check_checkpoint, check_kv_dtype, chosen_leaves
from pagedctl.engine.out_of_memory import refused_if_out_of_memory
from pagedctl.engine.own_precision import own_precision
from pagedctl.models.binding import DecoderPlans, bind_plans
from pagedctl.models.decoder import Decoder
from pagedctl.models.decoder_weights import require_tensors
from pagedctl.models.locate import locate_model
from pagedctl.models.resolve import ResolvedModel, WeightsPolicy, resolve_model
from pagedctl.models.spec import ModelSpec
from pagedctl.models.tokenizer import Tokenizer, load_tokenizer
from pagedctl.models.weights import load_weights, random_weights
from pagedctl.numerics.resolution import Numerics
from pagedctl_kernels.machine import Machine, this_machine
from pagedctl_kernels.registry import Registry

Tensors = Mapping[str, torch.Tensor]

TRIED_ELEMENTS = 1 << 25
"""Of a weight, in the checks of a display: a second and half a GiB a call site.

The checks of qwen3-8b's whole head take 43 s and 12 GiB (measured, two cores).
"""


@dataclass(frozen=True, kw_only=True)
class BoundModel:
    """A model whose every op has a leaf; no weight was read.

    ``config`` has what the model decides filled in; ``numerics`` is the contract as it holds
    on ``machine``.
    """

    config: EngineConfig
    resolved: ResolvedModel
    spec: ModelSpec
    machine: Machine
    numerics: Numerics
    plans: DecoderPlans


@dataclass(frozen=True, kw_only=True)
class LoadedModel(BoundModel):
    """A bound model with its weights in memory; several engines may share one."""

    decoder: Decoder
    tokenizer: Tokenizer | None
    weight_bytes: int

    def require_same_model(self, config: EngineConfig) -> None:
        """Raises ValueError unless *config* asks for this model under this contract."""
        names = (*options_of(ModelOptions), *options_of(ContractOptions), "kv_dtype", "block_size")
        mine, theirs = self.config.as_dict(), with_model(config, self.spec).as_dict()
        moved = [name for name in names if mine[name] != theirs[name]]
        if moved:
            raise ValueError(f"an engine cannot share a model of another {', '.join(moved)}")

    def require_positions(self, count: int) -> None:
        """Raises ValueError unless the RoPE table reaches *count* positions."""
        if count > len(self.decoder.cos_sin):
            raise ValueError(f"the shared model has {len(self.decoder.cos_sin)} positions")


def bind_model(
    config: EngineConfig, weights: Tensors | None, registry: Registry, *, display: bool = False
) -> BoundModel:
    """Resolve the model and bind a leaf of *registry* to each of its ops under the contract.

    *config* names its device. *weights* stand in for files, and only their dtype is looked at.
    With *display* nothing is to be loaded: a model without weights will do, and leaves check
    themselves on TRIED_ELEMENTS of a weight. Raises ModelError, ConfigError or NumericsRefused.
    """
    resolved = _resolve_model(config, weights, display)
    spec = _with_dtype_of(weights, resolved.spec, config)
    config = with_model(config, spec)
    numerics = config.contract.on_device(config.device)
    check_kv_dtype(config, spec)
    check_checkpoint(spec, config)
    with own_precision(config.device), weights_fit(spec):
        machine = this_machine(config.device)
        plans = bind_plans(
            spec,
            numerics,
            block_size=config.block_size,
            kv_dtype=config.kv_dtype,
            machine=machine,
            registry=registry,
            leaves=chosen_leaves(config, registry),
            tried_elements=TRIED_ELEMENTS if display else None,
        )
    return BoundModel(
        config=config,
        resolved=resolved,
        spec=spec,
        machine=machine,
        numerics=numerics,
        plans=plans,
    )


def load_model(
    bound: BoundModel, config: EngineConfig, weights: Tensors | None, *, num_positions: int
) -> LoadedModel:
    """Read the weights, or copy *weights*, and prepare them for the leaves."""
    spec = bound.spec
    with own_precision(config.device), weights_fit(spec):
        tensors = _tensors(config, bound.resolved, spec, weights, torch.device(config.device))
        decoder = Decoder(spec, bound.plans, tensors, num_positions=num_positions)
    return LoadedModel(
        config=bound.config,
        resolved=bound.resolved,
        spec=spec,
        machine=bound.machine,
        numerics=bound.numerics,
        plans=bound.plans,
        decoder=decoder,
        tokenizer=load_tokenizer(bound.resolved.tokenizer),
        weight_bytes=sum(tensor.nbytes for tensor in tensors.values()),
    )


# -- the configuration -----------------------------------------------------------------------


def with_device(config: EngineConfig) -> EngineConfig:
    """The device that ``auto`` stands for."""
    return _replace_auto(config, "device", "cpu", "the engine runs on the CPU")


def with_model(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """Fill in what the model decides."""
    config = _replace_auto(config, "dtype", spec.dtype, spec.dtype_origin)
    config = _replace_auto(config, "kv_dtype", spec.dtype, "dtype")
    config = config.derive("model positions", max_model_len=spec.max_position_embeddings)
    config = config.derive("max_num_batched_tokens", chunk_size=config.max_num_batched_tokens)
    return config.derive("device cpu", lag=0)


def _replace_auto(config: EngineConfig, name: str, value: object, rule: str) -> EngineConfig:
    """Resolve an option that says ``auto``; the origin tells by which rule."""
    if getattr(config, name) != "auto":
        return config
    origins = {**config.origins, name: f"derived: {rule}"}
    return replace(config, **{name: value}, origins=origins)  # type: ignore[arg-type]


# -- the model -------------------------------------------------------------------------------


def _resolve_model(config: EngineConfig, weights: Tensors | None, display: bool) -> ResolvedModel:
    needs_files = weights is None and config.random_weights is None
    policy: WeightsPolicy = "auto" if display else "required"
    return resolve_model(
        locate_model(config.model),
        dtype=config.dtype,
        weights=policy if needs_files else "ignore",
    )


def _with_dtype_of(weights: Tensors | None, spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """float64 weights given from Python make a float64 model, which no file can ask for."""
    if weights is None or config.dtype != "auto":
        return spec
    if all(tensor.dtype == torch.float64 for tensor in weights.values()):
        return replace(spec, dtype="float64", dtype_origin="derived: given weights")
    return spec


# -- weights ---------------------------------------------------------------------------------


def _tensors(
    config: EngineConfig,
    resolved: ResolvedModel,
    spec: ModelSpec,
    weights: Tensors | None,
    device: torch.device,
) -> Tensors:
    if weights is not None:
        return _copied(weights, spec, device)
    if config.random_weights is not None:
        return random_weights(spec, config.random_weights, device=device)
    return load_weights(resolved, device=device).tensors


def weights_fit(spec: ModelSpec) -> AbstractContextManager[None]:
    return refused_if_out_of_memory(
        f"the weights of {spec.weight_bytes()} bytes cannot be held",
        where=f"model {spec.name}, dtype {spec.dtype}",
        rule="the weights lie in memory once, and again in the form that a kernel needs",
        remedy="use a narrower --dtype, or a machine with more memory",
    )


def _copied(weights: Tensors, spec: ModelSpec, device: torch.device) -> Tensors:
    """Copies of the given tensors, which must be exactly those the model needs, in its dtype.

    Copies, because the caller's optimiser may write into its own while requests are running.
    """
    require_tensors(spec, weights, where="argument weights")
    return {name: tensor.detach().clone().to(device) for name, tensor in weights.items()}
