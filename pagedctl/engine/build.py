"""Builds the parts of an engine from a configuration: model, pool, rows, runner."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.batch_rows import BatchRows
from pagedctl.engine.block_pool import BlockPool, blocks_for
from pagedctl.engine.config_checks import CAPPED_BY_POOL, refuse_later
from pagedctl.engine.kv_cache import KVArena, block_bytes
from pagedctl.engine.model_parts import (
    LoadedModel,
    bind_model,
    load_model,
    with_device,
    with_model,
)
from pagedctl.engine.out_of_memory import refused_if_out_of_memory
from pagedctl.engine.runner import Runner
from pagedctl.engine.sampler import Sampler
from pagedctl.engine.scheduler import Scheduler, SchedulerLimits
from pagedctl.engine.verification import Verification, verified_contract
from pagedctl.errors import CapacityError, ConfigError
from pagedctl.models.binding import DecoderPlans
from pagedctl.models.spec import ModelSpec
from pagedctl.numerics.pins import hold_pins
from pagedctl.numerics.plugins import installed
from pagedctl_kernels.registry import Registry

Tensors = Mapping[str, torch.Tensor]
CPU_POOL_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """Everything that an engine drives; ``config`` has its derived values filled in."""

    config: EngineConfig
    model: LoadedModel
    verification: Verification
    arena: KVArena
    scheduler: Scheduler
    runner: Runner

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def plans(self) -> DecoderPlans:
        return self.model.plans


def build_parts(
    config: EngineConfig,
    weights: Tensors | None,
    *,
    registry: Registry | None = None,
    shared: LoadedModel | None = None,
    needs_record: bool = True,
) -> EngineParts:
    """Resolve the model, bind its plans under the contract, load weights and size the pool.

    *registry* None: the house's leaves and those of plug-ins. *shared* stands for a model that
    is loaded already. Raises ModelError, NumericsRefused, CapacityError or ConfigError.
    """
    config = with_device(refuse_later(config))
    hold_pins(config.contract.on_device(config.device, tp=config.tp), os.environ)
    if shared is not None:
        shared.require_same_model(config)
    bound = shared or bind_model(config, weights, registry or installed().leaves)
    verification = verified_contract(bound, config, os.environ, needs_record=needs_record)
    config, num_blocks = _with_pool(with_model(config, bound.spec), bound.spec)
    assert config.max_model_len is not None
    if shared is not None:
        shared.require_positions(config.max_model_len)
    model = shared or load_model(bound, config, weights, num_positions=config.max_model_len)
    device = torch.device(config.device)
    arena = _allocate_arena(model.spec, num_blocks, config, device)
    rows = BatchRows(
        max_num_seqs=config.max_num_seqs,
        max_blocks=blocks_for(config.max_model_len, config.block_size),
        block_size=config.block_size,
        dtype=_internal(model.spec),
        device=device,
    )
    runner = Runner(
        model.decoder,
        arena,
        rows,
        Sampler(model.decoder, str(config.contract["logprob_basis"])),
        guarded=model.machine if config.contract.contract.bitwise else None,
    )
    return EngineParts(
        config=config,
        model=model,
        verification=verification,
        arena=arena,
        scheduler=Scheduler(_limits(config), BlockPool(num_blocks)),
        runner=runner,
    )


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
