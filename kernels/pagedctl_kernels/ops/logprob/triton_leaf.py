"""The Hopper leaf of the logprob: two passes over the logits, and a fold."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.block_sumexp.segments import WARPS, Segments
from pagedctl_kernels.ops.block_sumexp.triton_leaf import TritonBlockSumexp
from pagedctl_kernels.ops.interfaces import BlockSumexp
from pagedctl_kernels.ops.logprob.likeliest import first_ids
from pagedctl_kernels.ops.logprob.triton_kernel import (
    row_maxima_kernel,
    scaled_segment_sums_kernel,
    shift_kernel,
    token_logprobs_kernel,
)
from pagedctl_kernels.ops.torch_checks import expect, int_fact
from pagedctl_kernels.ops.triton_rows import expect_device, row_stride

_PART = 8192
"""Columns of which one program takes the maximum."""

_TOKENS = 32
"""Tokens of a row that one program scores."""

_UNDER_WAY = 32
"""Sums that the fold loads together."""


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Logits float32[R, V], temperature float32[R], and the maximum of each part of a row."""

    logits: torch.Tensor
    temperature: torch.Tensor
    maxima: torch.Tensor

    @property
    def parts(self) -> int:
        return self.maxima.shape[1]

    @property
    def padded_parts(self) -> int:
        return 1 << (self.parts - 1).bit_length()


class TritonLogprob:
    def __init__(self, site: CallSite) -> None:
        self.form = str(site.facts["form"])
        self.block_size = int_fact(site, "block_size")
        self.multiply = site.facts["temperature_form"] == "multiply"

    def __call__(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        token_ids: torch.Tensor,
        *,
        block_sumexp: BlockSumexp,
    ) -> torch.Tensor:
        """logits float32[R, V], temperature float32[R], token_ids int64[R, K] -> float32[R, K].

        Order: temperature, the exact maximum, one difference, block sums of exp added left to
        right, one logarithm, one difference a token. T = 0 and T = 1 leave the logits as they
        are. A row with a NaN or +infinity, or without a finite value, gives NaN, and so does an
        id that is no column. Where *block_sumexp* is the house's own, its sums are taken without
        storing what it is given; they have the same bits.
        """
        self._check(logits, temperature)
        expect("logprob: token_ids", token_ids, torch.int64, (logits.shape[0], "K"))
        expect_device("logprob: token_ids", token_ids, logits.device)
        out = logits.new_empty(token_ids.shape)
        if not out.numel():
            return out
        rows = _rows(logits, temperature)
        segments = Segments(columns=logits.shape[1], block_size=self.block_size)
        if type(block_sumexp) is TritonBlockSumexp and block_sumexp.block_size == self.block_size:
            sums, chunks = self._segment_sums(rows, segments), segments.chunks
        else:
            sums, chunks = block_sumexp(self._shifted(rows), block_size=self.block_size), 1
            wanted = (logits.shape[0], segments.blocks)
            expect("logprob: block sums", sums, torch.float32, wanted)
            sums = sums.contiguous()
        tiles = -(-token_ids.shape[1] // _TOKENS)
        token_logprobs_kernel[(logits.shape[0] * tiles,)](
            rows.logits,
            rows.temperature,
            rows.maxima,
            sums,
            token_ids.contiguous(),
            out,
            logits.shape[1],
            rows.logits.stride(0),
            rows.parts,
            segments.blocks,
            token_ids.shape[1],
            CHUNKS=chunks,
            AHEAD=max(1, _UNDER_WAY // chunks),
            DIRECT=self.form != "blockwise",
            MULTIPLY=self.multiply,
            PARTS=rows.padded_parts,
            TILE=_TOKENS,
            num_warps=1,
            enable_fp_fusion=False,
        )
        return out

    def likeliest(
        self, logits: torch.Tensor, temperature: torch.Tensor, count: int
    ) -> torch.Tensor:
        """logits float32[R, V], temperature float32[R] -> int64[R, count], count in 1..V.

        The first tokens by (z descending, id ascending), z being what the logprob is of. A
        removed token comes after all others, and so does a NaN.
        """
        self._check(logits, temperature)
        return first_ids(logits, temperature.contiguous(), count, multiply=self.multiply)

    def _check(self, logits: torch.Tensor, temperature: torch.Tensor) -> None:
        expect("logprob: logits", logits, torch.float32, ("R", "V"))
        expect("logprob: temperature", temperature, torch.float32, (logits.shape[0],))
        expect_device("logprob: temperature", temperature, logits.device)
        row_stride("logprob: logits", logits)

    def _segment_sums(self, rows: _Rows, segments: Segments) -> torch.Tensor:
        """Chunk sums of fl(z - max z), float32[R, blocks x chunks]."""
        count, columns = rows.logits.shape
        sums = rows.logits.new_empty(count, segments.count)
        scaled_segment_sums_kernel[(count * segments.programs,)](
            rows.logits,
            rows.temperature,
            rows.maxima,
            sums,
            columns,
            rows.logits.stride(0),
            rows.parts,
            segments.count,
            BLOCK_SIZE=segments.block_size,
            CHUNKS=segments.chunks,
            GROUP=segments.group,
            WIDTH=segments.width,
            MULTIPLY=self.multiply,
            PARTS=rows.padded_parts,
            FUSED=rows.logits.is_cuda and not self.multiply,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
        return sums

    def _shifted(self, rows: _Rows) -> torch.Tensor:
        """fl(z - max z), float32[R, V]."""
        count, columns = rows.logits.shape
        shifted = rows.logits.new_empty(count, columns)
        shift_kernel[(count * rows.parts,)](
            rows.logits,
            rows.temperature,
            rows.maxima,
            shifted,
            columns,
            rows.logits.stride(0),
            rows.parts,
            PART=_PART,
            MULTIPLY=self.multiply,
            PARTS=rows.padded_parts,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
        return shifted


def _rows(logits: torch.Tensor, temperature: torch.Tensor) -> _Rows:
    """The rows with the maximum of each part, float32[R, ceil(V / _PART)]."""
    count, columns = logits.shape
    parts = -(-columns // _PART)
    maxima = logits.new_empty(count, parts)
    row_maxima_kernel[(count * parts,)](
        logits,
        maxima,
        columns,
        logits.stride(0),
        parts,
        PART=_PART,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return _Rows(logits=logits, temperature=temperature.contiguous(), maxima=maxima)


def build(site: CallSite, machine: Machine) -> TritonLogprob:
    return TritonLogprob(site)
