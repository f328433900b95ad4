"""The Hopper leaf of sampling: fixed launches, no synchronisation, no sort."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.interfaces import SampledRows, SamplingRows
from pagedctl_kernels.ops.sample import programs
from pagedctl_kernels.ops.sample.triton_finish import finish_kernel, mask_kernel
from pagedctl_kernels.ops.sample.triton_scan import CLASSES, scan_kernel
from pagedctl_kernels.ops.sample.triton_select import collect_kernel, floor_kernel
from pagedctl_kernels.ops.torch_checks import expect
from pagedctl_kernels.ops.triton_rows import expect_contiguous, expect_device, row_stride


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """What the launches of one call hand on; R rows, C chunks a row.

    ``peaks`` int32[R, C] and ``peak`` int32[R]: largest keys. ``winners`` int64[R, C]: packed.
    ``classes`` int32[R, C, CLASSES]; ``floor`` and ``taken`` int32[R]; ``masses`` int64[R, C].
    Candidates: ``keys`` and ``columns`` int32[R, capacity], ``weights`` int64[R, capacity].
    """

    peaks: torch.Tensor
    peak: torch.Tensor
    winners: torch.Tensor
    classes: torch.Tensor
    floor: torch.Tensor
    taken: torch.Tensor
    masses: torch.Tensor
    keys: torch.Tensor
    columns: torch.Tensor
    weights: torch.Tensor


class TritonSample:
    """*chunk* (columns of a program) and *capacity* (candidates of a row) change no bit."""

    def __init__(
        self, *, temperature_form: str, chunk: int = programs.CHUNK, capacity: int | None = None
    ) -> None:
        self.multiply = temperature_form == "multiply"
        self.chunk = chunk
        self.capacity = capacity
        self.part = min(programs.PART, chunk)
        self.searched = min(programs.SEARCHED, chunk)
        self.warps = programs.WARPS
        self.search_warps = programs.SEARCH_WARPS

    def __call__(self, logits: torch.Tensor, rows: SamplingRows) -> SampledRows:
        """logits float32[R, V] -> token_ids int64[R] and faulty bool[R].

        A row whose scaled logits hold a NaN or +infinity, or nothing finite, is faulty and gets
        token 0. The values of *rows* are not looked at on the host, which would wait for the
        device: the caller has checked them.
        """
        _check(logits, rows)
        count = len(logits)
        token_ids = torch.empty(count, dtype=torch.int64, device=logits.device)
        faulty = torch.empty(count, dtype=torch.bool, device=logits.device)
        if count:
            scratch = self._candidates(logits, rows, draw=True)
            self._finish(logits, rows, scratch, drawn=(token_ids, faulty.view(torch.uint8)))
        return SampledRows(token_ids=token_ids, faulty=faulty)

    def truncated(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """logits float32[R, V] with every token that truncation removes at -infinity.

        The kept set is that of ``__call__``; a row at T = 0 is truncated as it would be at
        T = 1. Faulty rows come back unchanged.
        """
        _check(logits, rows)
        count, vocab = logits.shape
        out = torch.empty((count, vocab), dtype=logits.dtype, device=logits.device)
        if not count:
            return out
        scratch = self._candidates(logits, rows, draw=False)
        ends, last_tied = torch.empty_like(scratch.floor), torch.empty_like(scratch.floor)
        self._finish(logits, rows, scratch, ends=(ends, last_tied))
        chunks = triton.cdiv(vocab, self.chunk)
        mask_kernel[(chunks * count,)](
            logits,
            logits.stride(0),
            rows.temperature,
            rows.min_p,
            scratch.peak,
            ends,
            last_tied,
            out,
            vocab,
            chunks,
            TILE=self.chunk,
            MULTIPLY=self.multiply,
            num_warps=self.warps,
            enable_fp_fusion=False,
        )
        return out

    def scan(
        self,
        logits: torch.Tensor,
        rows: SamplingRows,
        scratch: Scratch,
        *,
        token_offset: int = 0,
        draw: bool = True,
    ) -> None:
        """Peaks of all rows, the winners of untruncated rows (draw), the histograms of others.

        *token_offset*, a multiple of 4, is the id of the first column: of a vocabulary shard,
        whose winners compare with those of the other shards.
        """
        count, vocab = logits.shape
        chunks = triton.cdiv(vocab, self.chunk)
        scan_kernel[(chunks * count,)](
            logits,
            logits.stride(0),
            rows.temperature,
            rows.top_k,
            rows.top_p,
            rows.min_p,
            rows.seed,
            rows.position,
            scratch.peaks,
            scratch.winners,
            scratch.classes,
            vocab,
            token_offset,
            chunks,
            GROUPS=self.chunk // 4,
            MULTIPLY=self.multiply,
            DRAW=draw,
            num_warps=self.warps,
            enable_fp_fusion=False,
        )

    def scratch(self, logits: torch.Tensor) -> Scratch:
        """Fresh memory for one call, nothing in it initialised."""
        count, vocab = logits.shape
        chunks = triton.cdiv(vocab, self.chunk)
        capacity = self.capacity or programs.capacity_of(count, vocab)

        def narrow(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=logits.device)

        def wide(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int64, device=logits.device)

        return Scratch(
            peaks=narrow(count, chunks),
            peak=narrow(count),
            winners=wide(count, chunks),
            classes=narrow(count, chunks, CLASSES.value),
            floor=narrow(count),
            taken=narrow(count),
            masses=wide(count, chunks),
            keys=narrow(count, capacity),
            columns=narrow(count, capacity),
            weights=wide(count, capacity),
        )

    def _candidates(self, logits: torch.Tensor, rows: SamplingRows, *, draw: bool) -> Scratch:
        """The first three launches: up to the candidates of every truncated row."""
        count, vocab = logits.shape
        chunks = triton.cdiv(vocab, self.chunk)
        scratch = self.scratch(logits)
        capacity = scratch.keys.shape[1]
        self.scan(logits, rows, scratch, draw=draw)
        floor_kernel[(count,)](
            rows.temperature,
            rows.top_k,
            rows.top_p,
            rows.min_p,
            scratch.peaks,
            scratch.classes,
            scratch.peak,
            scratch.floor,
            scratch.taken,
            vocab,
            chunks,
            capacity,
            CHUNKS=triton.next_power_of_2(chunks),
            DRAW=draw,
            num_warps=programs.WARPS,
            enable_fp_fusion=False,
        )
        collect_kernel[(chunks * count,)](
            logits,
            logits.stride(0),
            rows.temperature,
            rows.top_p,
            scratch.peak,
            scratch.floor,
            scratch.taken,
            scratch.masses,
            scratch.keys,
            scratch.columns,
            scratch.weights,
            vocab,
            chunks,
            capacity,
            TILE=self.chunk,
            PART=self.part,
            MULTIPLY=self.multiply,
            DRAW=draw,
            num_warps=self.warps,
            enable_fp_fusion=False,
        )
        return scratch

    def _finish(
        self,
        logits: torch.Tensor,
        rows: SamplingRows,
        scratch: Scratch,
        *,
        drawn: tuple[torch.Tensor, torch.Tensor] | None = None,
        ends: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Fill *drawn* (token ids, faults) or *ends* (of the prefixes: keys, last ties)."""
        count, vocab = logits.shape
        chunks = triton.cdiv(vocab, self.chunk)
        finish_kernel[(count,)](
            logits,
            logits.stride(0),
            rows.temperature,
            rows.top_k,
            rows.top_p,
            rows.min_p,
            rows.seed,
            rows.position,
            scratch.winners,
            scratch.peak,
            scratch.floor,
            scratch.taken,
            scratch.masses,
            scratch.keys,
            scratch.columns,
            scratch.weights,
            *(drawn or (None, None)),
            *(ends or (None, None)),
            vocab,
            0,
            chunks,
            scratch.keys.shape[1],
            CHUNKS=triton.next_power_of_2(chunks),
            TILE=self.searched,
            MULTIPLY=self.multiply,
            DRAW=drawn is not None,
            num_warps=self.search_warps,
            enable_fp_fusion=False,
        )


def _check(logits: torch.Tensor, rows: SamplingRows) -> None:
    """Raise ValueError for a wrong dtype, shape, device or layout."""
    expect("sample: logits", logits, torch.float32, ("R", "V"))
    row_stride("sample: logits", logits)
    for name, dtype in (
        ("temperature", torch.float32),
        ("top_k", torch.int64),
        ("top_p", torch.float64),
        ("min_p", torch.float32),
        ("seed", torch.int64),
        ("position", torch.int64),
    ):
        column = getattr(rows, name)
        expect(f"sample: {name}", column, dtype, (len(logits),))
        expect_contiguous(f"sample: {name}", column)
        expect_device(f"sample: {name}", column, logits.device)


def build(site: CallSite, machine: Machine) -> TritonSample:
    return TritonSample(temperature_form=str(site.facts["temperature_form"]))
