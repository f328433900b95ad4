"""Builds the parts of an engine from a configuration: model, contract, pool, rows, runner."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.batch_rows import BatchRows
from pagedctl.engine.block_pool import BlockPool, blocks_for
from pagedctl.engine.config_checks import (
    CAPPED_BY_POOL,
    check_kv_dtype,
    check_logprob_width,
    refuse_later,
)
from pagedctl.engine.kv_cache import KVArena, block_bytes
from pagedctl.engine.out_of_memory import refused_if_out_of_memory
from pagedctl.engine.runner import Runner
from pagedctl.engine.sampler import Sampler
from pagedctl.engine.scheduler import Scheduler, SchedulerLimits
from pagedctl.errors import CapacityError, ConfigError, ModelError
from pagedctl.models.binding import DecoderPlans, bind_plans
from pagedctl.models.decoder import Decoder
from pagedctl.models.locate import locate_model
from pagedctl.models.resolve import ResolvedModel, resolve_model
from pagedctl.models.spec import ModelSpec
from pagedctl.models.tokenizer import Tokenizer, load_tokenizer
from pagedctl.models.weights import load_weights, random_weights
from pagedctl_kernels.catalogue import house_registry
from pagedctl_kernels.machine import this_machine

Tensors = Mapping[str, torch.Tensor]
CPU_POOL_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """Everything that an engine drives; ``config`` has its derived values filled in."""

    config: EngineConfig
    resolved: ResolvedModel
    spec: ModelSpec
    plans: DecoderPlans
    arena: KVArena
    scheduler: Scheduler
    runner: Runner
    tokenizer: Tokenizer | None
    weight_bytes: int


def build_parts(config: EngineConfig, weights: Tensors | None) -> EngineParts:
    """Resolve the model, bind its plans under the contract, load weights and size the pool.

    Raises ModelError, NumericsRefused, CapacityError or ConfigError.
    """
    config = _with_device(refuse_later(config))
    resolved = _resolve_model(config, weights)
    spec = _with_dtype_of(weights, resolved.spec, config)
    config = _with_model(config, spec)
    check_logprob_width(spec, config)
    machine = this_machine(config.device)
    with _weights_fit(spec):
        plans = bind_plans(
            spec,
            config.contract,
            block_size=config.block_size,
            kv_dtype=config.kv_dtype,
            machine=machine,
            registry=house_registry(),
        )
    config, num_blocks = _with_pool(config, spec)
    device = torch.device(config.device)
    assert config.max_model_len is not None
    with _weights_fit(spec):
        tensors = _tensors(config, resolved, spec, weights, device)
        decoder = Decoder(spec, plans, tensors, num_positions=config.max_model_len)
    arena = _allocate_arena(spec, num_blocks, config, device)
    rows = BatchRows(
        max_num_seqs=config.max_num_seqs,
        max_blocks=blocks_for(config.max_model_len, config.block_size),
        block_size=config.block_size,
        dtype=_internal(spec),
        device=device,
    )
    sampler = Sampler(decoder, str(config.contract["logprob_basis"]))
    return EngineParts(
        config=config,
        resolved=resolved,
        spec=spec,
        plans=plans,
        arena=arena,
        scheduler=Scheduler(_limits(config), BlockPool(num_blocks)),
        runner=Runner(
            decoder,
            arena,
            rows,
            sampler,
            guarded=machine if config.contract.contract.bitwise else None,
        ),
        tokenizer=load_tokenizer(resolved.tokenizer),
        weight_bytes=sum(tensor.nbytes for tensor in tensors.values()),
    )


def _with_device(config: EngineConfig) -> EngineConfig:
    return replace_auto(config, "device", "cpu", "the engine runs on the CPU")


def replace_auto(config: EngineConfig, name: str, value: object, rule: str) -> EngineConfig:
    """Resolve an option that says ``auto``; the origin tells by which rule."""
    if getattr(config, name) != "auto":
        return config
    origins = {**config.origins, name: f"derived: {rule}"}
    return replace(config, **{name: value}, origins=origins)  # type: ignore[arg-type]


def _resolve_model(config: EngineConfig, weights: Tensors | None) -> ResolvedModel:
    needs_files = weights is None and config.random_weights is None
    return resolve_model(
        locate_model(config.model),
        dtype=config.dtype,
        weights="required" if needs_files else "ignore",
    )


def _with_dtype_of(weights: Tensors | None, spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """float64 weights given from Python make a float64 model, which no file can ask for."""
    if weights is None or config.dtype != "auto":
        return spec
    if all(tensor.dtype == torch.float64 for tensor in weights.values()):
        return replace(spec, dtype="float64", dtype_origin="derived: given weights")
    return spec


def _with_model(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """Fill in what the model decides."""
    config = replace_auto(config, "dtype", spec.dtype, spec.dtype_origin)
    config = replace_auto(config, "kv_dtype", spec.dtype, "dtype")
    check_kv_dtype(config, spec)
    config = config.derive("model positions", max_model_len=spec.max_position_embeddings)
    config = config.derive("max_num_batched_tokens", chunk_size=config.max_num_batched_tokens)
    return config.derive("device cpu", lag=0)


def _with_pool(config: EngineConfig, spec: ModelSpec) -> tuple[EngineConfig, int]:
    """Size the pool, and lower a derived max_model_len to what it holds."""
    if config.gpu_memory_utilization is not None:
        raise ConfigError(
            f"gpu_memory_utilization {config.gpu_memory_utilization} is for GPUs",
            where="option gpu_memory_utilization",
            rule="on the CPU the pool is sized in bytes",
            remedy="use --kv-cache-memory-bytes",
        )
    config = config.derive("device cpu", kv_cache_memory_bytes=CPU_POOL_BYTES)
    assert config.kv_cache_memory_bytes is not None
    assert config.max_model_len is not None
    num_blocks = config.kv_cache_memory_bytes // block_bytes(spec, config)
    pool_tokens = num_blocks * config.block_size
    if pool_tokens + 1 >= config.max_model_len:
        return config, num_blocks
    if num_blocks == 0 or config.origins["max_model_len"] != "derived: model positions":
        raise _too_small(config, spec, num_blocks)
    origins = {**config.origins, "max_model_len": CAPPED_BY_POOL}
    return replace(config, max_model_len=pool_tokens + 1, origins=origins), num_blocks


def _allocate_arena(
    spec: ModelSpec, num_blocks: int, config: EngineConfig, device: torch.device
) -> KVArena:
    size_bytes = (num_blocks + 1) * block_bytes(spec, config)
    with refused_if_out_of_memory(
        f"the KV pool of {size_bytes} bytes cannot be allocated",
        where="option kv_cache_memory_bytes",
        rule=f"{num_blocks} blocks of {config.block_size} tokens lie in one piece of memory",
        remedy="lower --kv-cache-memory-bytes",
    ):
        return KVArena(
            spec,
            num_blocks=num_blocks,
            block_size=config.block_size,
            kv_dtype=config.kv_dtype,
            device=device,
        )


def _too_small(config: EngineConfig, spec: ModelSpec, num_blocks: int) -> CapacityError:
    assert config.max_model_len is not None
    needed = blocks_for(config.max_model_len - 1, config.block_size)
    needed_bytes = needed * block_bytes(spec, config)
    return CapacityError(
        f"the pool of {num_blocks} blocks cannot hold one request of {config.max_model_len} tokens",
        where="options kv_cache_memory_bytes and max_model_len",
        rule=f"max_model_len {config.max_model_len} needs {needed} blocks of "
        f"{config.block_size} tokens, {needed_bytes} bytes",
        remedy=f"give --kv-cache-memory-bytes {needed_bytes} or a smaller --max-model-len",
    )


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


def _weights_fit(spec: ModelSpec) -> AbstractContextManager[None]:
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
    expected = {tensor.name: tensor.shape for tensor in spec.tensors}
    dtype = getattr(torch, spec.dtype)
    wrong = [
        name
        for name in sorted({*expected, *weights})
        if name not in weights
        or name not in expected
        or tuple(weights[name].shape) != expected[name]
        or weights[name].dtype != dtype
    ]
    if wrong:
        raise ModelError(
            f"{len(wrong)} given tensors are missing, unknown, or of another shape or dtype: "
            + ", ".join(wrong[:8]),
            where="argument weights",
            rule=f"exactly the tensors of {spec.name}, in {spec.dtype}",
            remedy="give every tensor by its Hugging Face name",
        )
    return {name: tensor.detach().clone().to(device) for name, tensor in weights.items()}


def _limits(config: EngineConfig) -> SchedulerLimits:
    assert config.chunk_size is not None
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        chunk_size=config.chunk_size,
        block_size=config.block_size,
        prefix_cache=config.prefix_cache,
        force_preemption_interval=config.debug_force_preemption_interval,
    )


def _internal(spec: ModelSpec) -> torch.dtype:
    return torch.float64 if spec.dtype == "float64" else torch.float32
