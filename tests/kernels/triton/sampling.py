"""What the tests of sampling share: the definition of kept sets and draws on any device."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
import triton
import triton.language as tl

from pagedctl_kernels.ops.gumbel_noise import gumbel_noise
from pagedctl_kernels.ops.interfaces import SamplingRows
from pagedctl_kernels.ops.philox import token_words
from pagedctl_kernels.ops.sample.triton_leaf import TritonSample
from pagedctl_kernels.ops.sample.truncation import integer_mass
from pagedctl_kernels.ops.temperature import scale_logits
from tests.kernels import harness
from tests.kernels.triton.harness import DEVICE

CHUNK, CAPACITY = (256, 64) if DEVICE == "cuda" else (64, 16)
"""Small enough for the tests' rows to have several chunks and too many candidates."""


@triton.jit
def weights_kernel(z, peaks, weights, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < COLUMNS
        shifted = tl.load(z + row * COLUMNS + column, mask=inside, other=0.0) - tl.load(peaks + row)
        tl.store(weights + row * COLUMNS + column, tl.exp(shifted), mask=inside)


def device_weights(z: torch.Tensor) -> torch.Tensor:
    """exp(fl(z - max)) as this device's kernels compute it."""
    weights = torch.empty_like(z)
    weights_kernel[(len(z),)](
        z, z.amax(dim=-1), weights, COLUMNS=z.shape[1], BLOCK=4096, enable_fp_fusion=False
    )
    return weights


def leaf(form: str = "divide", *, chunk: int = CHUNK, capacity: int = CAPACITY) -> TritonSample:
    return TritonSample(temperature_form=form, chunk=chunk, capacity=capacity)


def rows_of(count: int, **columns: Any) -> SamplingRows:
    """Rows on the device; a row's position is its number unless told."""
    rows = harness.sampling_rows(count, **{"position": list(range(count)), **columns})
    return SamplingRows(**{one.name: getattr(rows, one.name).to(DEVICE) for one in fields(rows)})


def chosen(rows: SamplingRows, places: Any) -> SamplingRows:
    """Some of *rows*, in the order of *places*."""
    return SamplingRows(**{one.name: getattr(rows, one.name)[places] for one in fields(rows)})


def kept_by_definition(z: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """bool[R, V] of rows with a finite maximum, by sorting whole rows and adding integers."""
    vocab = z.shape[1]
    weights = device_weights(z)
    order = torch.sort(torch.where(z == 0, 0.0, z), dim=-1, descending=True, stable=True).indices
    rank = torch.arange(vocab, device=z.device)
    top_k = torch.where((rows.top_k <= 0) | (rows.top_k >= vocab), vocab, rows.top_k).unsqueeze(-1)
    mass = torch.where(rank < top_k, integer_mass(weights).gather(-1, order), 0).cumsum(dim=-1)
    total = mass[:, -1]
    target = torch.minimum(torch.ceil(rows.top_p * total.double()).long(), total)
    crossing = (mass < target.unsqueeze(-1)).sum(dim=-1, keepdim=True) + 1
    length = torch.where(rows.top_p.unsqueeze(-1) < 1, torch.minimum(crossing, top_k), top_k)
    prefix = torch.zeros_like(z, dtype=torch.bool).scatter_(-1, order, rank < length)
    return prefix & (z > -torch.inf) & (weights >= rows.min_p.unsqueeze(-1))


def drawn_by_definition(z: torch.Tensor, kept: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """First argmax of fl(z + noise) over the kept tokens, the noise of every token made."""
    groups = torch.arange(-(-z.shape[1] // 4), device=z.device)
    ids = []
    for row in range(len(z)):
        seed, position = rows.seed[row].expand(len(groups)), rows.position[row].expand(len(groups))
        noise = gumbel_noise(token_words(seed, position, groups)).flatten()[: z.shape[1]]
        score = torch.where(kept[row], z[row] + noise, -torch.inf)
        score = torch.where(rows.temperature[row] == 0, z[row], score)
        ids.append((score == score.max()).nonzero()[0, 0])
    return torch.stack(ids)


def assert_as_defined(
    run: TritonSample, logits: torch.Tensor, rows: SamplingRows, what: str = ""
) -> torch.Tensor:
    """Check kept sets, tokens and faults of *run* against the definition; returns the kept sets."""
    form = "multiply" if run.multiply else "divide"
    z = scale_logits(logits, rows.temperature, form)
    sound = torch.isfinite(z.amax(dim=-1)).nonzero().squeeze(-1)
    mine = chosen(rows, sound)
    kept = torch.ones_like(logits, dtype=torch.bool)
    kept[sound] = kept_by_definition(z[sound], mine)
    harness.assert_same_bits(
        run.truncated(logits, rows).nan_to_num(nan=7.0),
        logits.masked_fill(~kept, -torch.inf).nan_to_num(nan=7.0),
        f"{what}: kept set",
    )
    out = run(logits, rows)
    want = torch.zeros_like(out.token_ids)
    want[sound] = drawn_by_definition(z[sound], kept[sound], mine)
    assert_equal(out.token_ids, want, f"{what}: tokens")
    assert_equal(out.faulty, torch.ones_like(out.faulty).index_fill(0, sound, False), what)
    return kept


def assert_equal(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert got.tolist() == want.tolist(), what


def with_columns(rows: SamplingRows, **columns: torch.Tensor) -> SamplingRows:
    return replace(rows, **columns)
