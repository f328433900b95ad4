"""The kernel for many rows: every tile keeps a row's bits, whatever lies around it.

It is written in Gluon, which has no interpreter: without a GPU it is only compiled (test_builds).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagedctl_kernels.ops.tile_table import SHARED_BYTES, Tile, tile_table
from pagedctl_kernels.ops.triton_linear_large import fitted, launch_large
from tests.kernels.triton.harness import (
    DEVICE,
    PAYLOADS,
    assert_same_bits,
    bits,
    numbers,
    payload,
    poisoned,
    relative_error,
)
from tests.kernels.triton.plain_chain_kernel import plain_sums

WIDE = Tile(kind="persistent", block_m=128, block_n=256, block_k=64, warps=8, stages=4, group_m=8)
SPLIT = replace(WIDE, block_n=192, stages=5)
NARROW = replace(WIDE, block_n=96, stages=7)
TALL = replace(WIDE, block_m=256, block_n=128)
FORMS = {"wide": WIDE, "split": SPLIT, "narrow": NARROW, "tall": TALL}
EVERY_FORM = pytest.mark.parametrize("tile", FORMS.values(), ids=FORMS)

SHIPPED = list(
    dict.fromkeys(
        [
            *(tile for tile in tile_table("sm_90").all_tiles() if tile.kind == "persistent"),
            *FORMS.values(),
        ]
    )
)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    tile: Tile,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    y = poisoned(x.shape[0], weight.shape[0], dtype=dtype)
    launch_large(x, weight, bias, y, tile)
    return y


@pytest.mark.gpu
@EVERY_FORM
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_is_right_where_no_size_fits_the_tile(tile: Tile, with_bias: bool) -> None:
    for rows, n, k in ((1, 8, 8), (70, 136, 72), (643, 1544, 200)):
        x, w = numbers(1, rows, k, dtype="float16"), numbers(2, n, k, dtype="float16")
        bias = numbers(3, n, dtype="float16") if with_bias else None
        want = x.double() @ w.double().T + (0 if bias is None else bias.double())
        got = product(x, w, tile, bias)
        assert relative_error(got, want) < 1e-6
        assert_same_bits(product(x, w, tile, bias, torch.float16), got.half())


@pytest.mark.parametrize("itemsize", [2, 4])
def test_stages_and_stores_fit_shared_memory_and_a_tile_in_four_pieces(itemsize: int) -> None:
    for tile in SHIPPED:
        tail = tile.block_n // 3 if tile.block_n % 3 == 0 else 0
        width = tile.block_n - tail
        piece, stages = fitted(tile, tail or width, itemsize)
        stored = 2 * tile.block_m * piece * itemsize
        assert stages * tile.stage_bytes // tile.stages + stored < SHARED_BYTES
        assert 2 <= stages <= tile.stages
        assert width in (piece, 2 * piece, 4 * piece)
        assert tail % piece == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", PAYLOADS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("k", "n"), [(4096, 520), (1000, 264)])
def test_every_shipped_tile_has_the_bits_of_the_plain_chain(
    kind: str, dtype: str, k: int, n: int
) -> None:
    x, w = payload(kind, 6, 301, n, k, dtype)
    plain = plain_sums(x, w)
    segments = plain_sums(x, w, segments=2)
    assert (bits(segments) != bits(plain)).any(), "two segments must show in these numbers"
    exact = x.double() @ w.double().T
    terms = x.double().abs() @ w.double().abs().T
    assert ((plain.double() - exact).abs() <= 1e-5 * terms).all()
    for tile in SHIPPED:
        for rows in (301, 129):
            assert_same_bits(product(x[:rows].contiguous(), w, tile), plain[:rows])
        rounded = product(x, w, tile, dtype=x.dtype)
        assert_same_bits(rounded, plain.to(x.dtype))


@pytest.mark.gpu
def test_a_row_has_its_bits_in_any_place_and_beside_any_rows() -> None:
    x, w = payload("wide", 4, 515, 520, 768, "bfloat16")
    order = torch.arange(514, -1, -1, device=DEVICE)
    for tile in SHIPPED:
        whole = product(x, w, tile)
        assert_same_bits(product(x[order].contiguous(), w, tile), whole[order])
        assert_same_bits(product(x[77:78].contiguous(), w, tile)[0], whole[77])
        beside = torch.full_like(x, torch.nan)
        beside[77] = x[77]
        assert_same_bits(product(beside, w, tile)[77], whole[77])


@pytest.mark.gpu
def test_a_bias_is_added_to_the_unrounded_sum() -> None:
    x, w = numbers(7, 200, 512, dtype="bfloat16"), numbers(8, 512, 512, dtype="bfloat16")
    bias = numbers(9, 512, dtype="bfloat16")
    want = (plain_sums(x, w) + bias.float()).bfloat16()
    rounded_first = plain_sums(x, w).bfloat16() + bias
    assert (bits(rounded_first) != bits(want)).any(), "an early rounding must show here"
    for tile in SHIPPED:
        assert_same_bits(product(x, w, tile, bias, torch.bfloat16), want)


@pytest.mark.gpu
def test_a_shard_of_columns_has_the_bits_of_the_whole() -> None:
    x, w = payload("wide", 10, 260, 1024, 768, "bfloat16")
    for tile in SHIPPED:
        whole = product(x, w, tile)
        assert_same_bits(product(x, w[256:776].contiguous(), tile), whole[:, 256:776])


@pytest.mark.gpu
def test_an_output_beyond_2_to_the_31_elements_is_written_where_it_belongs() -> None:
    rows, n = 8208, 262144
    x = numbers(11, rows, 64, dtype="bfloat16")
    w = numbers(12, 2048, 64, dtype="bfloat16").repeat(n // 2048, 1)
    y = product(x, w, WIDE, dtype=torch.bfloat16)
    last = plain_sums(x[-16:].contiguous(), w[-2048:].contiguous()).bfloat16()
    assert_same_bits(y[-16:, -2048:], last)
    assert not y[::64].isnan().any()
