"""Linear layers in Triton: right against float64, and one order whatever tile serves a row."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch

from pagedctl_kernels.ops.tile_table import Tile, tile_table
from pagedctl_kernels.ops.triton_linear import launch
from pagedctl_kernels.sites import gemm_site, head_site, silu_mul_site
from tests.kernels.triton.harness import (
    DEVICE,
    PAYLOADS,
    assert_same_bits,
    bind_leaf,
    numbers,
    payload,
    poisoned,
    relative_error,
)
from tests.kernels.triton.plain_chain_kernel import plain_sums

HALF = ("float16", "bfloat16") if DEVICE == "cuda" else ("float16",)
"""The operand dtypes of tensor cores that run here."""

PROOF_ROWS = (1, 2, 3, 7, 16, 17, 31, 33, 64, 65, 100, 128, 200, 256, 300, 512, 1000)
DRAWN_ROWS = 200
COLUMNS = 272
"""Not a multiple of any tile above 16."""

OTHER_K = (96, 1000)
"""Contraction lengths that nothing was tuned for; no step of a tile above 32 divides them."""


def gemm(k: int, n: int, dtype: str, *, bias: bool = False) -> Any:
    return bind_leaf(gemm_site("proj", k=k, n=n, dtype=dtype, bias=bias), "triton.gemm")


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    n, k = weight.shape
    run = gemm(k, n, str(x.dtype).removeprefix("torch."), bias=bias is not None)
    return run(x, run.prepare(weight, bias))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("k", "n"), [(64, 48), (40, 33), (33, 70)])
def test_a_linear_layer_equals_the_float64_product(k: int, n: int, dtype: str) -> None:
    x, weight = numbers(1, 18, k, dtype=dtype), numbers(2, n, k, dtype=dtype)
    bias = numbers(3, n, dtype=dtype)
    want = x.double() @ weight.double().T
    tolerance = {"float16": 5e-4, "bfloat16": 4e-3}[dtype]
    assert relative_error(product(x, weight), want) < tolerance
    assert relative_error(product(x[:1], weight, bias), want[:1] + bias.double()) < tolerance


@pytest.mark.parametrize("dtype", HALF)
def test_the_head_keeps_its_sums_in_float32(dtype: str) -> None:
    x, weight = numbers(4, 5, 64, dtype=dtype), numbers(5, 100, 64, dtype=dtype)
    run = bind_leaf(head_site("head", k=64, n=100, dtype=dtype), "triton.head")
    logits = run(x, run.prepare(weight, None))
    assert logits.dtype == torch.float32
    assert relative_error(logits, x.double() @ weight.double().T) < 1e-6
    assert_same_bits(logits.to(x.dtype), product(x, weight), "rounded logits and gemm")


@pytest.mark.parametrize(("k", "n"), [(64, 48), (33, 70)])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(k: int, n: int) -> None:
    x, weight = numbers(6, 35, k, dtype="float16"), numbers(7, n, k, dtype="float16")
    together = product(x, weight)
    x[:20] = torch.nan
    assert_same_bits(product(x, weight)[20:], together[20:], "beside rows that are NaN")
    assert_same_bits(product(x[30:31].clone(), weight), together[30:31], "alone")


def test_a_prepared_weight_shares_the_checkpoints_memory_and_is_refreshed_in_place() -> None:
    first, second = numbers(8, 48, 64, dtype="float16"), numbers(9, 48, 64, dtype="float16")
    x = numbers(10, 3, 64, dtype="float16")
    run = gemm(64, 48, "float16")
    prepared = run.prepare(first, None)
    assert prepared.weight.data_ptr() == first.data_ptr()
    run.refresh(prepared, second, None)
    assert prepared.weight.data_ptr() == first.data_ptr()
    assert_same_bits(run(x, prepared), product(x, second), "refreshed and prepared anew")


def test_operands_on_odd_addresses_give_the_same_bits() -> None:
    x, weight = numbers(11, 5, 64, dtype="float16"), numbers(12, 48, 64, dtype="float16")
    moved = [
        torch.cat([one.new_zeros(1), one.reshape(-1)])[1:].view(one.shape) for one in (x, weight)
    ]
    assert all(one.data_ptr() % 16 for one in moved)
    assert_same_bits(product(*moved), product(x, weight), "moved by one element")


def test_no_rows_give_no_rows() -> None:
    assert product(
        numbers(1, 0, 64, dtype="float16"), numbers(2, 48, 64, dtype="float16")
    ).shape == (0, 48)


@pytest.mark.parametrize(
    ("x", "weight", "wrong"),
    [
        ((3, 63), (48, 64), "x must be float16"),
        ((3, 64), (47, 64), "weight must be float16"),
    ],
)
def test_operands_of_another_shape_are_refused(
    x: tuple[int, int], weight: tuple[int, int], wrong: str
) -> None:
    run = gemm(64, 48, "float16")
    with pytest.raises(ValueError, match=wrong):
        run(
            numbers(1, *x, dtype="float16"),
            run.prepare(numbers(2, *weight, dtype="float16"), None),
        )


def gemm_and_activation(k: int, width: int, dtype: str, rounding: str, *, bias: bool) -> Any:
    """The leaf of a layer, and that of its activation."""
    site = silu_mul_site("act", width=width, dtype=dtype, activation_rounding=rounding)
    return gemm(k, 2 * width, dtype, bias=bias), bind_leaf(site, "triton.silu_mul")


@pytest.mark.parametrize(
    ("k", "width", "bias", "rounding"),
    [(64, 48, False, "model"), (40, 40, True, "float32"), (33, 20, True, "model")],
)
def test_a_fused_activation_has_the_bits_of_the_two_kernels(
    k: int, width: int, bias: bool, rounding: str
) -> None:
    """On eighths, whose sums are exact: the interpreter's products have no order of their own."""
    linear, activation = gemm_and_activation(k, width, "float16", rounding, bias=bias)
    weight = numbers(14, 2 * width, k, dtype="float16").mul(2).round() / 8
    prepared = linear.prepare(weight, numbers(15, 2 * width, dtype="float16") if bias else None)
    x = numbers(13, 20, k, dtype="float16").mul(2).round() / 8
    fused = linear.fused_with(activation)
    for rows in (0, 1, 16, 20):
        want = activation(linear(x[:rows], prepared))
        assert_same_bits(fused(x[:rows], prepared), want, f"{rows} rows")


def test_a_layer_fuses_with_no_activation_but_its_own() -> None:
    linear, activation = gemm_and_activation(64, 48, "float16", "model", bias=False)
    other = gemm_and_activation(64, 40, "float16", "model", bias=False)[1]
    assert linear.fused_with(activation) is not None
    assert linear.fused_with(other) is None
    assert linear.fused_with(lambda gate_up: activation(gate_up)) is None


GATED = sorted({(one.k, one.n // 2) for one in tile_table("sm_90").gated if one.k and one.n})
"""K and output width of the layers with a gated tile of their own."""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("k", "width"), [*GATED, (4096, 12288), (512, 1000), (512, 501)])
@pytest.mark.parametrize("rounding", ["model", "float32"])
def test_fused_activations_of_real_layers_have_the_bits_of_the_two_kernels(
    k: int, width: int, dtype: str, rounding: str
) -> None:
    linear, activation = gemm_and_activation(k, width, dtype, rounding, bias=False)
    x, weight = numbers(16, 130, k, dtype=dtype), numbers(17, 2 * width, k, dtype=dtype) * 0.05
    prepared = linear.prepare(weight, None)
    assert linear.tiles.gated_at(1) is not None
    fused = linear.fused_with(activation)
    for rows in (1, 5, 16, 17, 50, 64, 130):
        want = activation(linear(x[:rows], prepared))
        assert_same_bits(fused(x[:rows], prepared), want, f"{rows} rows")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_overlapping_launches_wait_for_what_they_read(rows: int) -> None:
    """A long chain of launches, each of which reads what the one before it wrote.

    The same chain with a synchronisation after every launch is the control.
    """
    k = 4096
    run = gemm(k, k, "bfloat16")
    assert run.tiles.at(rows).overlap
    weights = [numbers(40 + i, k, k, dtype="bfloat16") * k**-0.5 for i in range(4)]
    prepared = [run.prepare(weight, None) for weight in weights]

    want = chain_of(run, prepared, rows, wait=True)
    assert want.isfinite().all()
    assert_same_bits(chain_of(run, prepared, rows), want, "launches that overlap")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain_of(run, prepared, rows)
    for _ in range(3):
        graph.replay()
        assert_same_bits(y, want, "a captured chain")


def chain_of(run: Any, prepared: list[Any], rows: int, *, wait: bool = False) -> torch.Tensor:
    """Sixty launches, each on the result of the one before it."""
    x = torch.ones(rows, run.k, dtype=torch.bfloat16, device=DEVICE)
    for step in range(60):
        x = run(x, prepared[step % len(prepared)])
        if wait:
            torch.cuda.synchronize()
    return x


# ---- One order, whatever the tile: on unrounded sums, on the GPU. ----


@cache
def operands(k: int, kind: str, dtype: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x of 1,000 rows, a weight of COLUMNS rows, and the plain chain's unrounded sums."""
    x, weight = payload(kind, 21, DRAWN_ROWS, COLUMNS, k, dtype)
    return x.repeat(5, 1), weight, plain_sums(x, weight).repeat(5, 1)


def tile_sums(x: torch.Tensor, weight: torch.Tensor, tile: Tile) -> torch.Tensor:
    sums = poisoned(x.shape[0], weight.shape[0])
    launch(x, weight, None, sums, tile)
    return sums


def prove(
    form: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    k: int,
    *,
    dtype: str = "bfloat16",
    row_counts: tuple[int, ...] = PROOF_ROWS,
) -> int:
    """Assert that *form* gives the plain chain's bits; returns how many results it compared."""
    for kind in PAYLOADS:
        x, weight, want = operands(k, kind, dtype)
        for rows in row_counts:
            assert_same_bits(form(x[:rows], weight), want[:rows], f"{kind}, K {k}, {rows} rows")
    return len(PAYLOADS) * len(row_counts)


def tuned() -> list[tuple[int, Tile]]:
    """Every tile of the shipped table, with each K that it serves."""
    table = tile_table("sm_90")
    pairs = [(entry.k, entry.tile) for entry in table.entries if entry.k is not None]
    pairs += [(k, entry.tile) for entry in table.defaults for k in OTHER_K]
    pairs += [(k, tile) for tile in table.plain for k in (*OTHER_K, 33, 128)]
    return sorted(set(pairs), key=str)


@pytest.fixture(scope="module")
def compiled_tiles() -> None:
    """Compile the proofs' kernels side by side; each takes about a second alone."""

    def compile_one(pair: tuple[int, Tile]) -> None:
        k, tile = pair
        x = torch.ones(1, k, dtype=torch.bfloat16, device=DEVICE)
        tile_sums(x, x.expand(COLUMNS, k).contiguous(), tile)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(compile_one, tuned()))


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled_tiles")
def test_every_tile_of_the_table_adds_in_the_plain_chains_order() -> None:
    pairs = tuned()
    assert {tile for _, tile in pairs} == set(tile_table("sm_90").all_tiles())
    for k, tile in pairs:
        prove(lambda x, weight, tile=tile: tile_sums(x, weight, tile), k)


@pytest.mark.gpu
def test_the_same_holds_in_float16_and_for_many_rows() -> None:
    for tile in tile_table("sm_90").all_tiles():
        few = lambda x, weight, tile=tile: tile_sums(x, weight, tile)  # noqa: E731
        prove(few, 1000, dtype="float16", row_counts=(1, 17, 300))
        x, weight, want = operands(1000, "random", "float16")
        many = x.repeat(5, 1)[:4096]
        assert_same_bits(tile_sums(many, weight, tile), want.repeat(5, 1)[:4096], str(tile))


@pytest.mark.gpu
def test_the_proof_sees_another_order() -> None:
    """Controls: the plain chain passes; two segments, and steps that descend, do not."""
    assert prove(plain_sums, 4096, row_counts=(64,)) == len(PAYLOADS)
    for mutant in ({"segments": 2}, {"descending": True}):
        with pytest.raises(AssertionError, match="differs first"):
            prove(lambda x, w, m=mutant: plain_sums(x, w, **m), 4096, row_counts=(64,))


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["gemm", "head"])
def test_shards_and_fused_projections_have_the_bits_of_the_whole(op: str) -> None:
    k, n = 4096, 6144
    weight, x = numbers(31, n, k, dtype="bfloat16"), numbers(32, 200, k, dtype="bfloat16")
    builders = {"gemm": lambda n: gemm(k, n, "bfloat16"), "head": lambda n: head(k, n)}
    build = builders[op]
    whole = build(n)
    for rows in (1, 16, 60, 200):
        want = whole(x[:rows], whole.prepare(weight, None))
        for widths in ((3072, 3072), (4096, 1024, 1024), (6000, 144)):
            parts, at = [], 0
            for width in widths:
                run = build(width)
                parts.append(run(x[:rows], run.prepare(weight[at : at + width], None)))
                at += width
            assert_same_bits(torch.cat(parts, dim=1), want, f"{op}: {widths}, {rows} rows")


def head(k: int, n: int) -> Any:
    return bind_leaf(head_site("head", k=k, n=n, dtype="bfloat16"), "triton.head")


@pytest.mark.gpu
def test_a_row_keeps_its_bits_in_every_bucket_and_place() -> None:
    k, n = 4096, 4096
    weight, x = numbers(33, n, k, dtype="bfloat16"), numbers(34, 1100, k, dtype="bfloat16")
    run = gemm(k, n, "bfloat16")
    prepared = run.prepare(weight, None)
    want = run(x, prepared)
    for rows in (1, 5, 16, 20, 40, 100, 200, 400, 800):
        assert_same_bits(run(x[:rows], prepared), want[:rows], f"the first {rows} of 1,100 rows")
    order = torch.randperm(1100, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    assert_same_bits(run(x[order], prepared), want[order], "permuted")
    assert relative_error(want, x.double() @ weight.double().T) < 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 200])
def test_a_captured_product_follows_its_operands(rows: int) -> None:
    run = gemm(1024, 4096, "bfloat16")
    weight, x = numbers(35, 4096, 1024, dtype="bfloat16"), numbers(36, rows, 1024, dtype="bfloat16")
    prepared = run.prepare(weight, None)
    run(x, prepared)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x, prepared)
    x.copy_(numbers(37, rows, 1024, dtype="bfloat16"))
    run.refresh(prepared, numbers(38, 4096, 1024, dtype="bfloat16"), None)
    graph.replay()
    assert_same_bits(y, run(x, prepared), "replayed and eager")


def test_rows_that_fit_no_descriptor_take_plain_tiles() -> None:
    """K decides for reading, and N, by the output's dtype, for the tiles that store so."""
    kinds = {"fits": gemm(72, 136, "float16"), "k": gemm(68, 136, "float16")}
    kinds |= {"n": gemm(72, 132, "float16")}
    kinds |= {"logits": bind_leaf(head_site("h", k=72, n=132, dtype="float16"), "triton.head")}
    found = {name: (run.tiles.at(1).kind, run.tiles.at(4096).kind) for name, run in kinds.items()}
    assert found == {
        "fits": ("descriptors", "persistent"),
        "k": ("pointers", "pointers"),
        "n": ("descriptors", "pointers"),
        "logits": ("descriptors", "persistent"),
    }
