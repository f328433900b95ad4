"""Embedding, RMSNorm, activation, QK-norm with RoPE and the cache write, and their sums."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedctl_kernels.ops.halving_tree import halving_tree_sum
from pagedctl_kernels.sites import (
    embedding_site,
    qk_norm_rope_write_site,
    rms_norm_site,
    silu_mul_site,
)
from tests.kernels import reference
from tests.kernels.harness import DTYPES, assert_same_bits, bound, numbers, threads
from tests.kernels.reference import assert_close, to_numpy

EPS = 1e-5
THETA = 10000.0


@given(st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=70))
@settings(max_examples=60, deadline=None)
def test_the_halving_tree_adds_the_upper_half_to_the_lower_half(values: list[float]) -> None:
    level = [np.float32(value) for value in values]
    level += [np.float32(0)] * ((1 << (len(level) - 1).bit_length()) - len(level))
    while len(level) > 1:
        half = len(level) // 2
        level = [level[i] + level[half + i] for i in range(half)]
    assert halving_tree_sum(torch.tensor(values)).item() == level[0]


def test_padding_a_sum_with_zeros_changes_no_bit() -> None:
    values = numbers(1, 5, 37).abs()
    padded = torch.cat([values, torch.zeros(5, 300)], dim=1)
    assert_same_bits(halving_tree_sum(padded), halving_tree_sum(values))


def test_reciprocal_square_roots_are_rounded_twice_and_correctly() -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.rand(100_003, generator=torch.Generator().manual_seed(0), dtype=dtype) * 9 + 1e-9
        for part in (x, x[1:7], x[3:50].view(-1, 1).expand(-1, 2)[:, 1], x[:12].view(3, 4).t()):
            want = 1 / np.sqrt(part.numpy())
            assert np.array_equal(torch.rsqrt(part).numpy(), want)


def test_quotients_by_a_number_are_divisions() -> None:
    x = numbers(2, 10_000)
    for divisor in (3, 7, 576):
        assert np.array_equal((x / divisor).numpy(), x.numpy() / np.float32(divisor))


@pytest.mark.parametrize("name", ["exp", "log"])
@pytest.mark.parametrize("count", [1, 2])
def test_exp_and_log_give_a_value_the_same_bits_anywhere(name: str, count: int) -> None:
    function = getattr(torch, name)
    x = numbers(3, 40_000) * 30
    x = x if name == "exp" else x.abs() + 1e-3
    with threads(count):
        whole = function(x)
        for start, length in ((0, 1), (1, 7), (3, 17), (5, 33), (0, 32_769), (2, 39_001)):
            part = function(x[start : start + length])
            assert_same_bits(part, whole[start : start + length], f"{start}+{length}")
        assert_same_bits(function(x.view(200, 200).t()), whole.view(200, 200).t(), "strided")
        assert_same_bits(function(x.view(200, 200)[:, 3]), whole.view(200, 200)[:, 3], "column")


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_copies_rows(dtype: str) -> None:
    weight = numbers(4, 50, 24, dtype=dtype)
    ids = torch.tensor([3, 49, 0, 3])
    run = bound(embedding_site("embed", vocab_size=50, width=24, dtype=dtype)).run
    assert_same_bits(run(ids, weight), weight[ids])
    with pytest.raises(ValueError, match=r"token_ids must be int64 \[T\], got int32 \[4\]"):
        run(ids.int(), weight)


def norm(width: int, dtype: str, norm_cast: str = "before") -> Any:
    site = rms_norm_site("norm", width=width, eps=EPS, dtype=dtype, norm_cast=norm_cast)
    return bound(site).run


@pytest.mark.parametrize("norm_cast", ["before", "after"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 128, 576])
def test_rms_norm_equals_the_float64_formula(width: int, dtype: str, norm_cast: str) -> None:
    x, weight = numbers(5, 9, width, dtype=dtype), numbers(6, width, dtype=dtype)
    residual = numbers(7, 9, width, dtype=dtype)
    y, stream = norm(width, dtype, norm_cast)(x, weight, residual)
    assert_same_bits(stream, (x.double() + residual.double()).to(x.dtype), "residual stream")
    want = reference.rms_norm(to_numpy(stream), to_numpy(weight), EPS)
    assert_close("rms_norm", dtype, y, want)
    y, stream = norm(width, dtype, norm_cast)(x, weight, None)
    assert stream is x
    assert_close("rms_norm", dtype, y, reference.rms_norm(to_numpy(x), to_numpy(weight), EPS))


def test_the_two_norm_casts_differ_in_bfloat16() -> None:
    x, weight = numbers(5, 9, 128, dtype="bfloat16"), numbers(6, 128, dtype="bfloat16")
    before, after = (
        norm(128, "bfloat16", cast)(x, weight, None)[0] for cast in ("before", "after")
    )
    assert not torch.equal(before, after)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2])
def test_a_normed_row_has_the_same_bits_alone_and_packed(dtype: str, count: int) -> None:
    x, weight = numbers(8, 33, 96, dtype=dtype), numbers(9, 96, dtype=dtype)
    residual = numbers(10, 33, 96, dtype=dtype)
    run = norm(96, dtype)
    with threads(count):
        packed = run(x, weight, residual)[0]
        for row in range(33):
            alone = run(x[row : row + 1], weight, residual[row : row + 1])[0]
            assert_same_bits(alone, packed[row : row + 1])


@pytest.mark.parametrize("rounding", ["model", "float32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_equals_the_float64_formula(dtype: str, rounding: str) -> None:
    site = silu_mul_site("act", width=70, dtype=dtype, activation_rounding=rounding)
    gate_up = numbers(11, 9, 140, dtype=dtype) * 4
    want = reference.silu_mul(*np.split(to_numpy(gate_up), 2, axis=1))
    y = bound(site).run(gate_up)
    assert_close("silu_mul", dtype, y, want)
    for row in range(9):
        assert_same_bits(bound(site).run(gate_up[row : row + 1]), y[row : row + 1])


def test_silu_of_very_negative_gates_is_zero() -> None:
    site = silu_mul_site("act", width=2, dtype="float32")
    y = bound(site).run(torch.tensor([[-200.0, -1e30, 1.0, 1.0]]))
    assert (y == 0).all()


def test_activation_rounding_changes_bfloat16_values() -> None:
    gate_up = numbers(11, 9, 140, dtype="bfloat16") * 4
    model, wide = (
        bound(silu_mul_site("act", width=70, dtype="bfloat16", activation_rounding=r)).run(gate_up)
        for r in ("model", "float32")
    )
    assert not torch.equal(model, wide)


class Rope:
    """One call of the op over a poisoned cache."""

    def __init__(self, dtype: str, *, qk_norm: bool, rotary_dim: int = 16, head_dim: int = 16):
        self.dtype, self.rotary_dim, self.head_dim = dtype, rotary_dim, head_dim
        self.q_heads, self.kv_heads, self.block_size = 4, 2, 8
        self.run = bound(
            qk_norm_rope_write_site(
                "rope",
                q_heads=4,
                kv_heads=2,
                head_dim=head_dim,
                rotary_dim=rotary_dim,
                block_size=8,
                dtype=dtype,
                qk_norm=qk_norm,
                eps=EPS,
            )
        ).run
        self.qkv = numbers(12, 11, 8 * head_dim, dtype=dtype)
        self.weights = (
            (numbers(13, head_dim, dtype=dtype), numbers(14, head_dim, dtype=dtype))
            if qk_norm
            else (None, None)
        )
        self.positions = torch.tensor([0, 1, 2, 500, 501, 37, 38, 39, 40, 41, 7])
        self.slots = torch.tensor([8, 9, 10, -1, 47, 16, 17, 18, 19, 20, 39])

    def table(self) -> torch.Tensor:
        half = self.rotary_dim // 2
        angles = np.outer(np.arange(512), THETA ** (-np.arange(half) / half))
        table = torch.from_numpy(np.concatenate([np.cos(angles), np.sin(angles)], axis=1))
        return table.to(torch.float64 if self.dtype == "float64" else torch.float32)

    def __call__(self, rows: slice = slice(None)) -> tuple[torch.Tensor, ...]:
        shape = (7, self.kv_heads, self.block_size, self.head_dim)
        k_cache = torch.full(shape, torch.nan, dtype=self.qkv.dtype)
        v_cache = k_cache.clone()
        q = self.run(
            self.qkv[rows],
            *self.weights,
            self.table(),
            self.positions[rows],
            self.slots[rows],
            k_cache,
            v_cache,
        )
        return q, k_cache, v_cache

    def heads(self, row: int) -> np.ndarray[Any, Any]:
        """The row's heads [8, Dh] after QK-norm (q and k), in float64, before rotation."""
        heads = to_numpy(self.qkv[row]).reshape(8, self.head_dim)
        if self.weights[0] is not None and self.weights[1] is not None:
            heads[:4] = reference.rms_norm(heads[:4], to_numpy(self.weights[0]), EPS)
            heads[4:6] = reference.rms_norm(heads[4:6], to_numpy(self.weights[1]), EPS)
        return heads


@pytest.mark.parametrize("rotary_dim", [16, 6])
@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_rotates_queries_and_keys_and_writes_the_cache(
    dtype: str, qk_norm: bool, rotary_dim: int
) -> None:
    case = Rope(dtype, qk_norm=qk_norm, rotary_dim=rotary_dim)
    q, k_cache, v_cache = case()
    for row, (position, slot) in enumerate(zip(case.positions, case.slots, strict=True)):
        heads = case.heads(row)
        turned = np.stack(
            [reference.rotate(head, int(position), THETA, rotary_dim) for head in heads[:6]]
        )
        assert_close("rope", dtype, q[row], turned[:4])
        if slot >= 0:
            block, offset = divmod(int(slot), case.block_size)
            assert_close("rope", dtype, k_cache[block, :, offset], turned[4:])
            assert np.array_equal(to_numpy(v_cache[block, :, offset]), heads[6:])


def test_a_negative_slot_and_every_other_slot_stay_unwritten() -> None:
    case = Rope("float32", qk_norm=True)
    _, k_cache, v_cache = case()
    written = torch.zeros(7 * 8, dtype=torch.bool)
    written[case.slots[case.slots >= 0]] = True
    for cache in (k_cache, v_cache):
        rows = cache.transpose(1, 2).reshape(7 * 8, -1)
        assert rows[~written].isnan().all()
        assert rows[written].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rotated_row_has_the_same_bits_alone_and_packed(dtype: str) -> None:
    case = Rope(dtype, qk_norm=True)
    packed = case()
    for row in range(11):
        alone = case(slice(row, row + 1))
        assert_same_bits(alone[0], packed[0][row : row + 1])
        slot = int(case.slots[row])
        if slot >= 0:
            place = (slot // 8, slice(None), slot % 8)
            assert_same_bits(alone[1][place], packed[1][place])
            assert_same_bits(alone[2][place], packed[2][place])


def test_rope_products_are_rounded_one_by_one() -> None:
    case = Rope("float32", qk_norm=False)
    q, _, _ = case()
    x = case.qkv[4].view(8, 16).numpy()
    c, s = np.split(case.table()[501].numpy(), 2)
    first, second = x[:4, :8] * c - x[:4, 8:] * s, x[:4, 8:] * c + x[:4, :8] * s
    assert np.array_equal(q[4].numpy(), np.concatenate([first, second], axis=1))


def test_rope_refuses_what_the_site_does_not_declare() -> None:
    case = Rope("float32", qk_norm=True)
    case.weights = (None, None)
    with pytest.raises(ValueError, match="declares QK-norm, see q_weight"):
        case()
    case = Rope("bfloat16", qk_norm=False)
    case.table = lambda: torch.zeros(512, 16, dtype=torch.bfloat16)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"cos_sin must be float32 \[P, 16\], got bfloat16"):
        case()


def test_the_scale_of_a_norm_is_that_of_its_row() -> None:
    x = torch.full((2, 64), 1e-3)
    x[1] = 1e3
    y = norm(64, "float32")(x, torch.ones(64), None)[0]
    assert math.isclose(y[1, 0].item(), 1, rel_tol=1e-6)
    assert math.isclose(y[0, 0].item(), 1e-3 / math.sqrt(1e-6 + EPS), rel_tol=1e-6)
