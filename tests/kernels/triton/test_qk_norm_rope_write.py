"""QK-norm, RoPE and the cache write in one kernel: q and cache have the stated bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedctl_kernels.ops.qk_norm_rope_write import triton_leaf
from pagedctl_kernels.ops.torch_checks import TORCH_DTYPES
from pagedctl_kernels.sites import qk_norm_rope_write_site
from tests.kernels import reference
from tests.kernels.harness import bound
from tests.kernels.reference import assert_close, to_numpy
from tests.kernels.triton.harness import (
    DEVICE,
    DTYPES,
    assert_same_bits,
    bind_leaf,
    bits,
    numbers,
)
from tests.kernels.triton.mutants import Workshop
from tests.kernels.triton.stated_norm import stated_norm

EPS = 1e-6
THETA = 10000.0
TABLE_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Heads and dimensions of one attention layer, and its switches."""

    q_heads: int = 3
    kv_heads: int = 2
    head_dim: int = 16
    rotary_dim: int = 16
    block_size: int = 4
    dtype: str = "float32"
    kv_dtype: str | None = None
    qk_norm: bool = True
    norm_cast: str = "before"

    @property
    def width(self) -> int:
        return (self.q_heads + 2 * self.kv_heads) * self.head_dim

    def site(self) -> Any:
        return qk_norm_rope_write_site("qk", eps=EPS, **vars(self))


SHAPES = {
    "whole head": Shape(),
    "no norm": Shape(qk_norm=False),
    "cast after": Shape(norm_cast="after"),
    "part of the head is rotated": Shape(rotary_dim=4),
    "part of it, no norm": Shape(rotary_dim=6, qk_norm=False),
    "most of the head is rotated": Shape(rotary_dim=12),
    "80 dimensions": Shape(q_heads=2, kv_heads=1, head_dim=80, rotary_dim=80),
    "96 dimensions, 64 of them rotated": Shape(kv_heads=3, head_dim=96, rotary_dim=64),
    "two dimensions": Shape(q_heads=5, kv_heads=5, head_dim=2, rotary_dim=2),
    "more heads than a program takes": Shape(q_heads=9, kv_heads=3, head_dim=256, rotary_dim=256),
}

MODEL_SHAPES = {
    "8B": Shape(q_heads=32, kv_heads=8, head_dim=128, rotary_dim=128, block_size=16),
    "0.6B": Shape(q_heads=16, kv_heads=8, head_dim=128, rotary_dim=128, block_size=16),
    "Llama": Shape(q_heads=9, kv_heads=3, head_dim=64, rotary_dim=64, qk_norm=False),
    "80": Shape(q_heads=32, kv_heads=32, head_dim=80, rotary_dim=32, block_size=256),
    "96": Shape(q_heads=32, kv_heads=8, head_dim=96, rotary_dim=96, block_size=32),
    "256": Shape(q_heads=16, kv_heads=1, head_dim=256, rotary_dim=64, block_size=16),
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """Operands of one call; the caches lie between two further blocks, all poisoned."""

    shape: Shape
    qkv: torch.Tensor
    weights: tuple[torch.Tensor | None, torch.Tensor | None]
    cos_sin: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    num_blocks: int

    def run(self, leaf: Any, device: str = DEVICE) -> tuple[torch.Tensor, ...]:
        """q, and the caches with the blocks around them."""
        shape = self.shape
        blocks = (self.num_blocks + 2, shape.kv_heads, shape.block_size, shape.head_dim)
        dtype = TORCH_DTYPES[shape.kv_dtype or shape.dtype]
        caches = [torch.full(blocks, torch.nan, dtype=dtype, device=device) for _ in range(2)]
        weights = [None if weight is None else weight.to(device) for weight in self.weights]
        rest = (part.to(device) for part in (self.cos_sin, self.positions, self.slots))
        q = leaf(self.qkv.to(device), *weights, *rest, *(cache[1:-1] for cache in caches))
        return q, *caches

    def kernel(self) -> tuple[torch.Tensor, ...]:
        return self.run(bind_leaf(self.shape.site(), "triton.qk_norm_rope_write"))

    def stated(self) -> tuple[torch.Tensor, ...]:
        """The norm as the order states it, then the CPU's leaf without one."""
        plain = replace(self.normed(), shape=replace(self.shape, qk_norm=False))
        outputs = plain.run(bound(plain.shape.site()).run, "cpu")
        return tuple(part.to(DEVICE) for part in outputs)

    def normed(self) -> Step:
        shape = self.shape
        heads = self.qkv.reshape(len(self.qkv), -1, shape.head_dim).clone()
        counts = [shape.q_heads, shape.kv_heads, shape.kv_heads]
        for part, weight in zip(torch.split(heads, counts, dim=1), self.weights, strict=False):
            if weight is not None:
                part.copy_(stated_norm(part, weight, EPS, shape.norm_cast))
        return replace(self, qkv=heads.view_as(self.qkv), weights=(None, None))

    def rows(self, chosen: list[int]) -> Step:
        index = torch.tensor(chosen, device=DEVICE)
        return replace(
            self, qkv=self.qkv[index], positions=self.positions[index], slots=self.slots[index]
        )


def step(shape: Shape, rows: int, *, num_blocks: int = 5, seed: int = 1) -> Step:
    """Rows at shuffled positions and slots; the second row, if any, writes nothing."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(num_blocks * shape.block_size, generator=generator)[:rows]
    slots[1:2] = -1
    half = shape.rotary_dim // 2
    angles = torch.outer(
        torch.arange(TABLE_ROWS).double(), THETA ** (-torch.arange(half).double() / half)
    )
    norm = [numbers(seed + i, shape.head_dim, dtype=shape.dtype) for i in (1, 2)]
    return Step(
        shape=shape,
        qkv=numbers(seed, rows, shape.width, dtype=shape.dtype),
        weights=(norm[0], norm[1]) if shape.qk_norm else (None, None),
        cos_sin=torch.cat([angles.cos(), angles.sin()], dim=1).float().to(DEVICE),
        positions=torch.randint(0, TABLE_ROWS, (rows,), generator=generator).to(DEVICE),
        slots=slots.to(DEVICE),
        num_blocks=num_blocks,
    )


def assert_stated_bits(one: Step) -> None:
    for part, got, want in zip(("q", "k", "v"), one.kernel(), one.stated(), strict=True):
        assert torch.equal(got.isnan(), want.isnan()), f"{part}: what was written"
        assert_same_bits(got.nan_to_num(nan=3.0), want.nan_to_num(nan=3.0), part)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_stated(dtype: str, name: str) -> None:
    assert_stated_bits(step(replace(SHAPES[name], dtype=dtype), 3))


@pytest.mark.gpu
@pytest.mark.parametrize("norm_cast", ["before", "after"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bits_are_those_stated_at_model_shapes(dtype: str, norm_cast: str) -> None:
    for shape in MODEL_SHAPES.values():
        one = step(replace(shape, dtype=dtype, norm_cast=norm_cast), 130, num_blocks=70)
        assert_stated_bits(one)


@pytest.mark.gpu
def test_a_float32_model_s_cache_may_be_narrower() -> None:
    assert_stated_bits(step(replace(MODEL_SHAPES["8B"], dtype="float32", kv_dtype="bfloat16"), 9))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_is_near_the_formula_in_float64(dtype: str) -> None:
    shape = Shape(dtype=dtype, qk_norm=False, rotary_dim=8)
    one = step(shape, 4)
    q, k_cache, v_cache = (to_numpy(part.cpu()) for part in one.kernel())
    heads = to_numpy(one.qkv.cpu()).reshape(4, -1, shape.head_dim)
    for row, (position, slot) in enumerate(
        zip(one.positions.tolist(), one.slots.tolist(), strict=True)
    ):
        want = [reference.rotate(head, position, THETA, 8) for head in heads[row, :5]]
        assert_close("rope", dtype, torch.tensor(q[row]), want[0:3] @ _identity(16))
        if slot >= 0:
            block, offset = 1 + slot // shape.block_size, slot % shape.block_size
            keys, values = k_cache[block, :, offset], v_cache[block, :, offset]
            assert_close("rope", dtype, torch.tensor(keys), want[3:5] @ _identity(16))
            assert (values == heads[row, 5:]).all()


def _identity(size: int) -> Any:
    return torch.eye(size, dtype=torch.float64).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_place(dtype: str) -> None:
    shape = SHAPES["whole head"] if DEVICE == "cpu" else MODEL_SHAPES["8B"]
    one = step(replace(shape, dtype=dtype), 5)
    q, k_cache, v_cache = one.kernel()
    order = [3, 0, 4, 1, 2]
    moved = one.rows(order).kernel()
    assert_same_bits(moved[0], q[torch.tensor(order, device=DEVICE)], "permuted")
    assert_same_bits(moved[1], k_cache, "keys, permuted")
    assert_same_bits(moved[2], v_cache, "values, permuted")
    assert_same_bits(one.rows([2]).kernel()[0], q[2:3], "alone")
    gapped = torch.empty(5, shape.width + 3, dtype=q.dtype, device=DEVICE)
    gapped[:, 1 : shape.width + 1] = one.qkv
    odd = replace(one, qkv=gapped[:, 1 : shape.width + 1]).kernel()
    assert_same_bits(odd[0], q, "rows at odd addresses")
    assert_same_bits(odd[1], k_cache, "keys of rows at odd addresses")


@pytest.mark.gpu
def test_more_elements_than_32_bits_count() -> None:
    shape = replace(MODEL_SHAPES["8B"], dtype="bfloat16")
    num_blocks = 2**31 // (shape.kv_heads * shape.block_size * shape.head_dim) + 5
    near = step(shape, 2, num_blocks=3)
    near.slots.copy_(torch.tensor([5, 47]))
    shift = (num_blocks - 3) * shape.block_size
    far = replace(near, num_blocks=num_blocks, slots=near.slots + shift)
    for got, want in zip(far.kernel()[1:], near.kernel()[1:], strict=True):
        assert_same_bits(got[-4:-1], want[1:-1])


@pytest.mark.gpu
def test_a_captured_graph_gives_the_same_bits() -> None:
    one = step(replace(MODEL_SHAPES["8B"], dtype="bfloat16"), 17)
    leaf = bind_leaf(one.shape.site(), "triton.qk_norm_rope_write")
    want = one.run(leaf)
    caches = [torch.zeros_like(part[1:-1]) for part in want[1:]]
    operands = (one.qkv, *one.weights, one.cos_sin, one.positions, one.slots, *caches)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = leaf(*operands)
    q.fill_(torch.nan)
    for cache in caches:
        cache.fill_(torch.nan)
    graph.replay()
    for got, expected in zip((q, *caches), (want[0], *(w[1:-1] for w in want[1:])), strict=True):
        assert_same_bits(got, expected)


def only_known_places_are_touched() -> bool:
    """Whether odd slots write nothing, and a position outside the table gives NaN."""
    one = step(SHAPES["whole head"], 5)
    one.slots.copy_(torch.tensor([-1, -3, 20, 2**40, 3]))
    one.positions[4] = TABLE_ROWS
    q, k_cache, v_cache = one.kernel()
    written = ~v_cache.isnan()
    assert written[1, :, 3].all()
    written[1, :, 3] = False
    outside = bool(written.any()) or not bool(k_cache.isnan().all())
    return not outside and bool(q[4].isnan().all()) and not bool(q[:4].isnan().any())


def test_a_slot_or_position_outside_is_not_followed() -> None:
    assert only_known_places_are_touched()


def test_no_rows_is_no_launch() -> None:
    assert step(Shape(), 0).kernel()[0].shape == (0, 3, 16)


def test_operands_are_checked() -> None:
    one = step(Shape(), 2)
    with pytest.raises(ValueError, match=r"qkv must be float32 \[T, 112\]"):
        replace(one, qkv=one.qkv[:, :100]).kernel()
    with pytest.raises(ValueError, match="declares QK-norm, see q_weight"):
        replace(one, weights=(None, None)).kernel()
    with pytest.raises(ValueError, match=r"positions must be int64 \[2\]"):
        replace(one, positions=one.positions[:1]).kernel()
    with pytest.raises(ValueError, match="cos_sin must be contiguous"):
        replace(one, cos_sin=one.cos_sin.t().contiguous().t()).kernel()
    with pytest.raises(ValueError, match="rotary_dim 32 is above head_dim 16"):
        step(Shape(rotary_dim=32), 1).kernel()


def has_stated_bits() -> bool:
    one = step(replace(SHAPES["whole head"], dtype="float16"), 5)
    return all(
        torch.equal(bits(got), bits(want))
        for got, want in zip(one.kernel(), one.stated(), strict=True)
    )


MUTANTS = {
    "pairs turn the other way": (
        has_stated_bits,
        "first.to(tl.float32) * cos - second.to(tl.float32) * sin",
        "first.to(tl.float32) * cos + second.to(tl.float32) * sin",
    ),
    "the second half is normed with the first half's weight": (
        has_stated_bits,
        "tl.load(weight + HALF + half",
        "tl.load(weight + half",
    ),
    "values are written where keys belong": (
        has_stated_bits,
        "(Q_HEADS + KV_HEADS + heads) * HEAD_DIM",
        "(Q_HEADS + heads) * HEAD_DIM",
    ),
    "a negative slot is followed": (
        only_known_places_are_touched,
        "(slot >= 0) & (slot < slots)",
        "slot < slots",
    ),
}


@pytest.mark.parametrize("what", MUTANTS)
def test_a_mutant_is_caught(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop = Workshop(triton_leaf, "qk_norm_rope_write_heads", tmp_path, monkeypatch)
    check, old, new = MUTANTS[what]
    assert check()
    launches = workshop.change(old, new)
    assert not check()
    assert launches.count == 1
