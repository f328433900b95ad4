"""The attention kernels on lists made by hand: no tile height, cut or launch changes a bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedctl_kernels.house import SPLIT_TOKENS
from pagedctl_kernels.ops.attention import triton_launch
from pagedctl_kernels.ops.attention.device_work import DeviceWork, Layout, TileClass
from pagedctl_kernels.ops.attention.triton_launch import Launch, attend, plan_launch
from pagedctl_kernels.ops.torch_checks import TORCH_DTYPES
from tests.kernels.reference import assert_close
from tests.kernels.triton.harness import DEVICE, assert_same_bits, poisoned
from tests.kernels.triton.mutants import Workshop
from tests.kernels.triton.paged import DevicePaged, Span, paged

HEIGHTS = (16, 64, 128)


def list_work(batch: DevicePaged, spans: Sequence[Span], rows: int, *, cut: bool) -> DeviceWork:
    """Items of one tile height; *cut*: each split of an item is an item of its own."""
    items, tokens, slots, merges, positions = [], [], [], [], []
    held = 0
    window = batch.site.get("window")
    fit = rows // (batch.q_heads // batch.kv_heads)
    for table, (_, start, end) in enumerate(spans):
        row = len(positions) - start
        positions += range(start, end)
        for first in range(start, end, fit):
            at = list(range(first, min(first + fit, end)))
            lowest = 0 if window is None else max(at[0] - window + 1, 0)
            splits = range(lowest // SPLIT_TOKENS, at[-1] // SPLIT_TOKENS + 1)
            for split in splits if cut else splits[:1]:
                past = split + 1 if cut else splits[-1] + 1
                items.append([len(tokens), len(at), table, split, past, int(cut), at[-1], at[0]])
                tokens += [row + p for p in at]
                slots += [held + i * len(splits) + split - splits[0] for i in range(len(at))]
            if cut:
                each = range(len(at))
                merges += [[row + at[i], held + i * len(splits), len(splits), 0] for i in each]
                held += len(at) * len(splits)
    items.sort(key=lambda item: item[3] - item[4])

    def ints(values: Any, *shape: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE).reshape(shape)

    return DeviceWork(
        classes=(TileClass(rows=rows, items=ints(items, -1, 8)),),
        item_counts=ints(len(items), 1),
        tokens=ints(tokens, -1),
        slots=ints(slots, -1),
        positions=ints(positions, -1),
        block_tables=batch.block_tables[[i for i, _, _ in spans]].to(DEVICE).contiguous(),
        merges=ints(merges, -1, 4),
        merge_count=ints(len(merges), 1),
        state_m=poisoned(held, batch.q_heads),
        state_l=poisoned(held, batch.q_heads),
        state_a=poisoned(held, batch.q_heads, batch.head_dim),
        buffer=ints([], 0),
        layout=Layout(
            class_rows=(rows,),
            items=(len(items),),
            places=len(tokens),
            tokens=len(positions),
            seqs=len(spans),
            max_blocks=batch.block_tables.shape[1],
            merges=len(merges),
            slots=held,
        ),
        num_tokens=len(positions),
        rows=len(positions),
        block_range=(0, 0),
    )


def launch_of(batch: DevicePaged, p_dtype: str | None = None) -> Launch:
    return plan_launch(
        q_heads=batch.q_heads,
        kv_heads=batch.kv_heads,
        head_dim=batch.head_dim,
        block_size=batch.block_size,
        window=batch.site.get("window"),
        scale=math.log2(math.e) / math.sqrt(batch.head_dim),
        p_dtype=TORCH_DTYPES[p_dtype or batch.dtype],
    )


def run(
    batch: DevicePaged,
    spans: Sequence[Span],
    rows: int = 16,
    *,
    cut: bool = False,
    p_dtype: str | None = None,
) -> torch.Tensor:
    """Output rows of the spans, D[T, Hq, Dh]; what is not written stays NaN."""
    q = batch.queries(spans)
    out = torch.full_like(q, torch.nan)
    work = list_work(batch, spans, rows, cut=cut)
    attend(q, batch.k_cache, batch.v_cache, out, work, launch_of(batch, p_dtype))
    return out


def assert_right(batch: DevicePaged, spans: Sequence[Span], got: torch.Tensor) -> None:
    want = torch.cat([batch.reference(span) for span in spans])
    assert_close("attention", batch.dtype, got.cpu(), want.cpu().numpy())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("window", [None, 90])
def test_direct_items_and_cut_ones_give_the_same_bits(dtype: str, window: int | None) -> None:
    batch = paged(1, [520, 70], dtype=dtype, window=window)
    spans = [(0, 512, 520), (1, 69, 70)]
    whole = run(batch, spans)
    assert_right(batch, spans, whole)
    assert_same_bits(run(batch, spans, cut=True), whole)


def test_a_merge_without_states_writes_zeros() -> None:
    batch = paged(2, [20])
    work = list_work(batch, [(0, 18, 20)], 16, cut=True)
    work.merges[1, 2] = 0
    q = batch.queries([(0, 18, 20)])
    out = torch.full_like(q, torch.nan)
    attend(q, batch.k_cache, batch.v_cache, out, work, launch_of(batch))
    assert_same_bits(out[0], run(batch, [(0, 18, 20)])[0])
    assert_same_bits(out[1], torch.zeros_like(out[1]))


def test_a_list_may_be_shorter_than_its_memory() -> None:
    batch = paged(3, [20, 33])
    work = list_work(batch, batch.ends(), 16, cut=False)
    work.item_counts[0] = 1
    q = batch.queries(batch.ends())
    out = torch.full_like(q, torch.nan)
    attend(q, batch.k_cache, batch.v_cache, out, work, launch_of(batch))
    assert out[0].isnan().all() != out[1].isnan().all()


def change(kernel: str, old: str, new: str, folder: Path, patch: pytest.MonkeyPatch) -> Any:
    return Workshop(triton_launch, kernel, folder, patch).change(old, new)


def test_values_that_no_row_sees_must_be_zeroed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = (paged(4, [300], order=order) for order in range(99))
    batch = next(one for one in orders if not (one.block_tables == 0).any())
    assert batch.v_cache[0].isnan().all()
    assert_right(batch, batch.ends(), run(batch, batch.ends()))
    old = "v = tl.load(v_cache + kv_at, mask=kv_on, other=0.0)"
    launches = change("attend_items", old, "v = tl.load(v_cache + kv_at)", tmp_path, monkeypatch)
    assert run(batch, batch.ends()).isnan().any()
    assert launches.count == 1


def test_splits_must_be_merged_left_to_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = paged(5, [1000], head_dim=64)
    whole = run(batch, batch.ends())
    assert_same_bits(run(batch, batch.ends(), cut=True), whole)
    old, new = "(first_slot + slot)", "(first_slot + num_slots - 1 - slot)"
    launches = change("merge_states", old, new, tmp_path, monkeypatch)
    reversed_order = run(batch, batch.ends(), cut=True)
    assert_right(batch, batch.ends(), reversed_order)
    assert not torch.equal(reversed_order, whole)
    assert launches.count == 1


LENGTHS = [1, 2, 63, 64, 65, 130, 255, 256, 257, 511, 512, 513, 700, 1000, 1024, 1025, 2048, 4097]


def long_batch(head_dim: int, dtype: str = "bfloat16", **options: Any) -> DevicePaged:
    return paged(6, LENGTHS, q_heads=32, kv_heads=8, head_dim=head_dim, dtype=dtype, **options)


def widen(batch: DevicePaged) -> None:
    """Queries and values whose exponents go far apart."""
    for q in batch.batch.q:
        q *= torch.exp2(torch.arange(q.shape[-1], device=DEVICE) % 7 - 3.0).to(q.dtype)
    batch.v_cache *= torch.exp2(torch.arange(batch.block_size, device=DEVICE) % 16 - 8.0).to(
        batch.v_cache.dtype
    )[:, None]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "dtype", "options"),
    [
        (128, "bfloat16", {}),
        (128, "float16", {"window": 700}),
        (64, "bfloat16", {"block_size": 64}),
        (80, "bfloat16", {"block_size": 48, "window": 300}),
        (96, "float16", {"block_size": 256}),
        (256, "bfloat16", {"block_size": 32}),
    ],
)
@pytest.mark.parametrize("wide", [False, True])
def test_every_tile_height_and_cut_gives_the_same_bits(
    head_dim: int, dtype: str, options: dict[str, Any], wide: bool
) -> None:
    batch = long_batch(head_dim, dtype, **options)
    if wide:
        widen(batch)
    spans = batch.ends()
    whole = run(batch, spans)
    assert whole.isfinite().all()
    if not wide:
        assert_right(batch, spans, whole)
    for rows in HEIGHTS:
        for cut in (False, True):
            assert_same_bits(run(batch, spans, rows, cut=cut), whole, f"{rows} rows, cut {cut}")


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 300])
def test_every_row_of_a_prefill_has_its_decode_s_bits(window: int | None) -> None:
    batch = paged(7, [1300], q_heads=32, kv_heads=8, head_dim=128, dtype="bfloat16", window=window)
    prefill = run(batch, [(0, 0, 1300)], 128)
    assert_right(batch, [(0, 0, 1300)], prefill)
    for rows in HEIGHTS:
        chunks = [run(batch, [(0, s, e)], rows) for s, e in ((0, 333), (333, 1000), (1000, 1300))]
        assert_same_bits(torch.cat(chunks), prefill, f"chunks in tiles of {rows} rows")
    for p in (0, 1, 63, 64, 65, 255, 256, 511, 512, 700, 1023, 1024, 1299):
        assert_same_bits(run(batch, [(0, p, p + 1)], cut=True)[0], prefill[p], f"position {p}")


@pytest.mark.gpu
def test_a_row_sum_in_another_order_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on sums of float16 numbers: those of bfloat16 ones are nearly always exact."""
    batch = long_batch(128, "float16")

    def sums(rows: int) -> torch.Tensor:
        work = list_work(batch, batch.ends(), rows, cut=True)
        q = batch.queries(batch.ends())
        attend(q, batch.k_cache, batch.v_cache, torch.empty_like(q), work, launch_of(batch))
        return work.state_l

    sound = sums(16)
    assert_same_bits(sums(64), sound)
    old = 'l = tl.dot(p, ones, l * f, input_precision="ieee")'
    new = "l = l * f + tl.sum(p.to(tl.float32), 1)[:, None]"
    launches = change("attend_items", old, new, tmp_path, monkeypatch)
    assert_right(batch, batch.ends(), run(batch, batch.ends()))
    assert not torch.equal(sums(16), sound)
    assert launches.count == 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "p_dtype"),
    [
        ("float32", "float32", "float32"),
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "bfloat16", "float32"),
        ("float16", "float16", "float32"),
    ],
)
def test_float32_operands_take_the_same_chain_in_every_tile(
    dtype: str, kv_dtype: str, p_dtype: str
) -> None:
    batch = paged(8, [1, 64, 300, 513], q_heads=8, kv_heads=2, head_dim=128, dtype=dtype)
    batch.k_cache = batch.k_cache.to(TORCH_DTYPES[kv_dtype])
    batch.v_cache = batch.v_cache.to(TORCH_DTYPES[kv_dtype])
    if kv_dtype == dtype:
        assert_right(batch, batch.ends(), run(batch, batch.ends(), p_dtype=p_dtype))
    spans = [(2, 200, 300), (3, 500, 513)]
    whole = run(batch, spans, p_dtype=p_dtype)
    for rows in HEIGHTS:
        for cut in (False, True):
            assert_same_bits(run(batch, spans, rows, cut=cut, p_dtype=p_dtype), whole)
