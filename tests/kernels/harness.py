"""Builders for kernel tests: bound leaves, paged batches with poisoned caches, thread counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from pagedctl_kernels.catalogue import house_registry
from pagedctl_kernels.leaf import CallSite, Requirement
from pagedctl_kernels.machine import this_machine
from pagedctl_kernels.ops.interfaces import AttentionMetadata, SamplingRows
from pagedctl_kernels.ops.torch_checks import TORCH_DTYPES
from pagedctl_kernels.plan import Plan, plan
from pagedctl_kernels.sites import attention_site

DTYPES = ("float32", "bfloat16", "float16", "float64")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bound(site: CallSite, *names: str) -> Plan:
    """The plan of *site* on this machine; *names* restricts the candidates."""
    wanted = Requirement(names=names or None)
    return plan(house_registry(), site, this_machine("cpu"), wanted)


def numbers(seed: int, *shape: int, dtype: str = "float32") -> torch.Tensor:
    """Gaussian numbers whose values are exact in *dtype*."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(TORCH_DTYPES[dtype])


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, what: str = "") -> None:
    """Equal bit for bit (+0 is not -0, a NaN equals itself); reports the first difference."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    differs = bits(got) != bits(want)
    if not differs.any():
        return
    place = tuple(differs.nonzero()[0].tolist())
    raise AssertionError(f"{what} differs first at {place}: {got[place]!r} != {want[place]!r}")


def bits(values: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    return values.contiguous().view(INTEGERS[values.itemsize])


@dataclass(frozen=True)
class Sequences:
    """Keys, values and queries of every position of several sequences, before paging.

    ``q`` [L, Hq, Dh], ``k`` and ``v`` [L, Hkv, Dh], one tensor a sequence.
    """

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]

    @property
    def lengths(self) -> list[int]:
        return [len(q) for q in self.q]


def sequences(
    seed: int,
    lengths: Sequence[int],
    *,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    dtype: str = "float32",
) -> Sequences:
    return Sequences(
        q=[numbers(seed + 3 * i, n, q_heads, head_dim, dtype=dtype) for i, n in enumerate(lengths)],
        k=[
            numbers(seed + 3 * i + 1, n, kv_heads, head_dim, dtype=dtype)
            for i, n in enumerate(lengths)
        ],
        v=[
            numbers(seed + 3 * i + 2, n, kv_heads, head_dim, dtype=dtype)
            for i, n in enumerate(lengths)
        ],
    )


class Paged:
    """A poisoned KV cache that holds sequences in shuffled blocks, and the leaf that reads it."""

    def __init__(
        self, batch: Sequences, *, block_size: int = 16, seed: int = 0, **site: Any
    ) -> None:
        self.batch = batch
        self.block_size = block_size
        self.site = dict(site)
        _, self.q_heads, self.head_dim = batch.q[0].shape
        self.kv_heads = batch.k[0].shape[1]
        self.dtype = str(batch.q[0].dtype).removeprefix("torch.")
        blocks = [-(-length // block_size) for length in batch.lengths]
        order = torch.randperm(sum(blocks) + 3, generator=torch.Generator().manual_seed(seed))
        shape = (len(order), self.kv_heads, block_size, self.head_dim)
        self.k_cache = torch.full(shape, torch.nan, dtype=batch.q[0].dtype)
        self.v_cache = self.k_cache.clone()
        self.block_tables = torch.full((len(blocks), max(blocks) + 1), -1, dtype=torch.int32)
        taken = 0
        for sequence, count in enumerate(blocks):
            self.block_tables[sequence, :count] = order[taken : taken + count].int()
            taken += count
        self._fill()

    def _fill(self) -> None:
        for sequence, (k, v) in enumerate(zip(self.batch.k, self.batch.v, strict=True)):
            place = torch.arange(len(k))
            blocks = self.block_tables[sequence, place // self.block_size].long()
            self.k_cache[blocks, :, place % self.block_size] = k
            self.v_cache[blocks, :, place % self.block_size] = v

    def leaf(self) -> Any:
        return bound(
            attention_site(
                "attention",
                q_heads=self.q_heads,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                block_size=self.block_size,
                dtype=self.dtype,
                **self.site,
            )
        ).run

    def attend(self, spans: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
        """One step over (sequence, start, end): queries start..end, keys 0..end."""
        metadata = AttentionMetadata(
            query_start_loc=np.cumsum([0] + [e - s for _, s, e in spans]).astype(np.int32),
            seq_lens=np.array([e for _, _, e in spans], dtype=np.int32),
            block_tables=self.block_tables[[i for i, _, _ in spans]],
        )
        q = torch.cat([self.batch.q[i][s:e] for i, s, e in spans])
        leaf = self.leaf()
        out = leaf(q, self.k_cache, self.v_cache, leaf.prepare(metadata))
        return list(torch.split(out, [e - s for _, s, e in spans]))

    def prefill(self) -> list[torch.Tensor]:
        """Every row of every sequence in one step."""
        return self.attend([(i, 0, n) for i, n in enumerate(self.batch.lengths)])


def sampling_rows(count: int, **columns: Any) -> SamplingRows:
    """Rows with defaults (T = 1, nothing truncated); a column is a value or a list."""
    internal = columns.pop("internal", torch.float32)
    defaults: dict[str, tuple[Any, torch.dtype]] = {
        "temperature": (1.0, internal),
        "top_k": (0, torch.int64),
        "top_p": (1.0, torch.float64),
        "min_p": (0.0, internal),
        "seed": (7, torch.int64),
        "position": (0, torch.int64),
    }
    filled = {}
    for name, (default, dtype) in defaults.items():
        value = columns.pop(name, default)
        filled[name] = torch.as_tensor(value, dtype=dtype).expand(count).contiguous()
    assert not columns
    return SamplingRows(**filled)


@cache
def sampler() -> Any:
    from pagedctl_kernels.sites import sample_site

    return bound(sample_site("sample", dtype="float32")).run
