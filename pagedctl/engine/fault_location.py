"""Where a forward pass first leaves the finite numbers: one eager rerun, off the serving path."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from pagedctl.engine.block_pool import blocks_for
from pagedctl.engine.kv_cache import KVArena
from pagedctl.models.binding import DecoderPlans
from pagedctl.models.decoder import Decoder, DecoderBatch
from pagedctl_kernels.ops.interfaces import AttentionMetadata
from pagedctl_kernels.plan import Plan

Report = Callable[[str, Any], None]


@dataclass(frozen=True, kw_only=True)
class FaultLocation:
    """The op whose output holds the first value that is not finite, and the token it is of.

    ``layer`` is None before the first layer and behind the last.
    """

    op: str
    layer: int | None
    position: int

    def __str__(self) -> str:
        layer = "" if self.layer is None else f" of layer {self.layer}"
        return f"{self.op}{layer}, token {self.position}"


def locate_fault(
    decoder: Decoder,
    token_ids: Sequence[int],
    *,
    block_size: int,
    kv_dtype: str,
    chunk_size: int,
) -> FaultLocation | None:
    """Compute *token_ids* once more, in a cache of their own; None if every value is finite."""
    device = decoder.embedding.device
    num_blocks = blocks_for(len(token_ids), block_size)
    arena = KVArena(
        decoder.spec,
        num_blocks=num_blocks,
        block_size=block_size,
        kv_dtype=kv_dtype,
        device=device,
    )
    for start in range(0, len(token_ids), chunk_size):
        watch = _Watch(start)
        batch = _batch_of(token_ids[start : start + chunk_size], start, num_blocks, device)
        watched = copy.copy(decoder)
        watched.plans = _watched(decoder.plans, watch.see)
        watched.mlp_rows = chunk_size  # a place in an output is then one in the chunk
        with torch.inference_mode():
            watched.logits(watched.forward(batch, arena.layers()))
        if watch.found is not None:
            return watch.found
    return None


class _Watch:
    """Sees every op's output in order. A layer begins with its first norm and has two."""

    def __init__(self, start: int) -> None:
        self.found: FaultLocation | None = None
        self._start = start
        self._norms = 0

    def see(self, op: str, output: Any) -> None:
        self._norms += op == "norm"
        tensor = output[0] if isinstance(output, tuple) else output
        if self.found is not None or not isinstance(tensor, torch.Tensor):
            return
        broken = ~torch.isfinite(tensor.reshape(tensor.shape[0], -1)).all(dim=-1)
        if bool(broken.any()):
            position = self._start + int(broken.nonzero()[0, 0])
            self.found = FaultLocation(op=op, layer=self._layer(op), position=position)

    def _layer(self, op: str) -> int | None:
        outside = self._norms == 0 or op == "head"
        return None if outside else (self._norms - 1) // 2


class _Watched:
    """An op's implementation that reports what it returns."""

    def __init__(self, run: Any, op: str, report: Report) -> None:
        self._run = run
        self._op = op
        self._report = report

    def __call__(self, *arguments: Any) -> Any:
        output = self._run(*arguments)
        self._report(self._op, output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)


def _watched(plans: DecoderPlans, report: Report) -> DecoderPlans:
    found: dict[str, Any] = {}
    for one in fields(plans):
        value = getattr(plans, one.name)
        if isinstance(value, Plan):
            found[one.name] = replace(value, run=_Watched(value.run, one.name, report))
        else:
            found[one.name] = {
                window: replace(plan, run=_Watched(plan.run, one.name, report))
                for window, plan in value.items()
            }
    return DecoderPlans(**found)


def _batch_of(
    token_ids: Sequence[int], start: int, num_blocks: int, device: torch.device
) -> DecoderBatch:
    """The tokens of one sequence from *start* on, whose blocks are the cache's, in order."""
    positions = torch.arange(start, start + len(token_ids), device=device)
    return DecoderBatch(
        token_ids=torch.tensor(list(token_ids), dtype=torch.int64, device=device),
        positions=positions,
        slot_mapping=positions,
        metadata=AttentionMetadata(
            query_start_loc=np.array([0, len(token_ids)], dtype=np.int32),
            seq_lens=np.array([start + len(token_ids)], dtype=np.int32),
            block_tables=np.arange(num_blocks, dtype=np.int32)[None],
        ),
    )
