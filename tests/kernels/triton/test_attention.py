"""Attention on the device: right against float64, and the same bits however a step is packed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.ops.attention import triton_launch, triton_leaf
from pagedctl_kernels.ops.attention.device_tiles import Policy
from pagedctl_kernels.ops.attention.device_work import Capacity
from pagedctl_kernels.plan import LeafUnfit
from pagedctl_kernels.sites import attention_site
from tests.kernels.reference import assert_close
from tests.kernels.triton.harness import DEVICE, DTYPES, assert_same_bits, hopper
from tests.kernels.triton.mutants import Workshop
from tests.kernels.triton.paged import DevicePaged, Span, paged

POLICIES = {
    "direct": Policy(programs=(1, 1, 1), state_cost=0, grouped=False, cut=False),
    "grouped": Policy(programs=(1, 1, 1), state_cost=0, launch_cost=-1, cut=False),
    "merged": Policy(programs=(1, 1, 1), state_cost=0, launch_cost=-1, cut=False, resumed=False),
    "cut": Policy(programs=(10**6, 10**6, 10**6), state_cost=0, slack=1, grouped=False),
    "both": Policy(programs=(10**6, 10**6, 10**6), state_cost=0, launch_cost=-1, slack=1),
}


def assert_same_rows(got: torch.Tensor, want: torch.Tensor, what: str = "") -> None:
    """The same bits. Interpreted dots are a library's, whose order follows a tile's height and
    its operands' addresses, so there the rows are only close."""
    if DEVICE == "cuda":
        assert_same_bits(got, want, what)
        return
    dtype = str(want.dtype).removeprefix("torch.")
    assert got.dtype == want.dtype
    assert_close("attention", dtype, got, want.double().numpy())


def attend(
    batch: DevicePaged, spans: Sequence[Span], policy: str | None = None
) -> list[torch.Tensor]:
    builder = batch.leaf().builder
    before = builder.policy
    builder.policy = before if policy is None else POLICIES[policy]
    try:
        return batch.attend(spans)
    finally:
        builder.policy = before


def assert_right(batch: DevicePaged, spans: Sequence[Span], policy: str | None = None) -> None:
    for span, rows in zip(spans, attend(batch, spans, policy), strict=True):
        assert_close("attention", batch.dtype, rows.cpu(), batch.reference(span).cpu().numpy())


def assert_equal_rows(
    batch: DevicePaged,
    spans: Sequence[Span],
    whole: dict[int, torch.Tensor],
    policy: str | None = None,
) -> None:
    """Rows of the spans have the bits of the same positions of *whole*, by sequence."""
    for (i, start, end), rows in zip(spans, attend(batch, spans, policy), strict=True):
        assert_same_rows(rows, whole[i][start:end], f"sequence {i}, {start}..{end}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_equals_the_float64_softmax(dtype: str) -> None:
    assert_right(paged(1, [1, 63, 65, 300], dtype=dtype), [(0, 0, 1), (1, 0, 63), (3, 250, 300)])


@pytest.mark.parametrize("window", [1, 65, 257])
def test_a_window_counts_the_query_itself_and_hides_everything_older(window: int) -> None:
    batch = paged(2, [65, 300], q_heads=2, window=window)
    assert_right(batch, [(0, 0, 65), (1, 299, 300)])


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(3, 3), (14, 2), (40, 1)])
def test_every_group_size_reads_its_own_kv_head(q_heads: int, kv_heads: int) -> None:
    batch = paged(3, [5, 70], q_heads=q_heads, kv_heads=kv_heads)
    assert_right(batch, [(0, 0, 5), (1, 69, 70)])


@pytest.mark.parametrize("head_dim", [8, 80, 256])
def test_every_head_dim_is_scaled_by_its_square_root(head_dim: int) -> None:
    assert_right(paged(4, [70], head_dim=head_dim), [(0, 60, 70)])


def test_block_size_and_physical_order_of_blocks_change_no_bit() -> None:
    want = paged(5, [300, 70]).attend([(0, 290, 300), (1, 69, 70)])
    for block_size in (1, 48, 256):
        batch = paged(5, [300, 70], block_size=block_size, order=block_size)
        for got, expected in zip(batch.attend([(0, 290, 300), (1, 69, 70)]), want, strict=True):
            assert_same_rows(got, expected, f"block_size {block_size}")


@pytest.mark.parametrize(("dtype", "window"), [("float32", None), ("float16", 70)])
def test_decode_chunks_and_prefill_give_the_same_bits(dtype: str, window: int | None) -> None:
    batch = paged(6, [300], dtype=dtype, window=window)
    whole = dict(enumerate(batch.prefill()))
    decodes = [[(0, p, p + 1)] for p in (0, 63, 64, 255, 256, 299)]
    chunks = [[(0, s, e)] for s, e in ((0, 23), (40, 64), (200, 300), (250, 266), (290, 296))]
    for spans in decodes + chunks:
        assert_equal_rows(batch, spans, whole)


def grouped_batch(**options: Any) -> DevicePaged:
    """Three sequences that continue one prefix of two splits, one alone, one of one split."""
    lengths = [513, 600, 512, 530, 300]
    forks = [None, *[(0, 512)] * 2, None, (0, 256)]
    return paged(7, lengths, forks=forks, q_heads=4, kv_heads=1, **options)


@pytest.mark.parametrize("window", [None, 400])
def test_groups_and_cuts_give_the_bits_of_direct_items(window: int | None) -> None:
    batch = grouped_batch(window=window)
    spans = batch.ends()
    alone = [attend(batch, [span], "direct")[0] for span in spans]
    assert_right(batch, spans, "both")
    for policy in POLICIES:
        work = batch.leaf().builder
        for got, want in zip(attend(batch, spans, policy), alone, strict=True):
            assert_same_rows(got, want, policy)
        work.policy = POLICIES[policy]
        classes = work.prepare(batch.metadata(spans)).classes
        places = max(int(tile_class.items[:, 1].max()) for tile_class in classes)
        assert (places > 1) == (policy in ("grouped", "merged", "both"))


def test_a_chunk_that_is_cut_gives_the_bits_of_a_whole_one() -> None:
    batch = paged(8, [560], window=300)
    spans = [(0, 548, 560)]
    assert_right(batch, spans, "cut")
    assert_same_rows(attend(batch, spans, "cut")[0], attend(batch, spans, "direct")[0])


def test_a_row_has_the_same_bits_alone_packed_and_permuted() -> None:
    lengths = [1, 17, 64, 65, 130, 256, 257, 300]
    batch = paged(9, lengths)
    alone = {i: batch.attend([(i, n - 1, n)])[0] for i, n in enumerate(lengths)}
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(len(lengths)).tolist()
        spans = [(i, lengths[i] - 1, lengths[i]) for i in order]
        for i, rows in zip(order, batch.attend(spans), strict=True):
            assert_same_rows(rows, alone[i], f"sequence {i}")
    mixed = batch.attend([(7, 40, 120), (6, 256, 257), (2, 0, 64), (0, 0, 1)])
    assert_same_rows(mixed[1], alone[6])
    assert_same_rows(mixed[3], alone[0])


def test_unwritten_slots_and_stale_table_entries_are_never_seen() -> None:
    batch = paged(10, [70, 300], window=40)
    want = batch.attend([(1, 290, 300), (0, 69, 70)])
    batch.block_tables[1, :15] = -1
    batch.k_cache[batch.block_tables[1, 16].long(), :, :4] = torch.inf
    for got, expected in zip(batch.attend([(1, 299, 300), (0, 69, 70)]), want, strict=True):
        assert_same_rows(got[-1:], expected[-1:])
        assert got.isfinite().all()


def test_another_sequence_s_poison_stays_with_it() -> None:
    batch = paged(11, [33, 33, 33])
    want = batch.attend(batch.ends())
    batch.batch.q[1][:] = torch.nan
    blocks = batch.block_tables[1, :3].long()
    batch.k_cache[blocks], batch.v_cache[blocks] = torch.nan, torch.inf
    got = batch.attend(batch.ends())
    assert_same_rows(got[0], want[0])
    assert_same_rows(got[2], want[2])
    assert not got[1].isfinite().any()


def test_a_zero_output_has_a_positive_sign() -> None:
    batch = grouped_batch()
    batch.v_cache[:] = -0.0
    for policy in ("direct", "both"):
        for rows in attend(batch, batch.ends(), policy):
            assert not torch.signbit(rows).any()


def test_rows_past_the_metadata_give_zeros_and_an_idle_sequence_none() -> None:
    batch = paged(12, [20, 30])
    spans = [(0, 18, 20), (1, 30, 30)]
    q = torch.cat([batch.queries(spans), torch.full((3, 4, 16), torch.nan, device=DEVICE)])
    leaf = batch.leaf()
    out = leaf(q, batch.k_cache, batch.v_cache, leaf.prepare(batch.metadata(spans)))
    assert_same_rows(out[:2], batch.attend([(0, 18, 20)])[0])
    assert (out[2:] == 0).all()
    assert not torch.signbit(out[2:]).any()


def capacity(batch: DevicePaged, **limits: int) -> Capacity:
    wanted = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "max_query_len": 64,
        "max_blocks": batch.block_tables.shape[1],
        "num_blocks": len(batch.k_cache),
        "max_slots": 200,
    }
    return Capacity(**{**wanted, **limits})


def test_reserved_memory_serves_one_step_after_another() -> None:
    batch = grouped_batch()
    leaf = batch.leaf()
    leaf.builder.policy = POLICIES["both"]
    work = leaf.reserve(capacity(batch))
    for spans in (batch.ends(), [(1, 565, 600)], batch.ends()[::-1][:3], []):
        q = torch.full((40, batch.q_heads, batch.head_dim), torch.nan, device=DEVICE)
        queries = batch.queries(spans) if spans else q[:0]
        q[: len(queries)] = queries
        work = leaf.refill(work, batch.metadata(spans), rows=40)
        out = leaf(q, batch.k_cache, batch.v_cache, work)
        assert (out[len(queries) :] == 0).all()
        if spans:
            assert_same_rows(out[: len(queries)], torch.cat(attend(batch, spans, "direct")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (4, 4, 8)}, r"q must be fp32 \[T, 4, 16\]"),
        ({"q": (3, 4, 16)}, "q has 3 rows, the metadata 4 queries"),
        ({"k_cache": (9, 2, 8, 16)}, r"k_cache must be fp32 \[num_blocks, 2, 16, 16\]"),
        ({"v_cache": (1, 2, 16, 16)}, r"block tables name blocks 0..\d, the caches hold 7 and 1"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    batch = paged(13, [20, 30])
    leaf = batch.leaf()
    work = leaf.prepare(batch.metadata([(0, 17, 20), (1, 29, 30)]))
    shapes = {"q": (4, 4, 16), "k_cache": (7, 2, 16, 16), "v_cache": (7, 2, 16, 16), **change}
    operands = {name: torch.zeros(shape, device=DEVICE) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message.replace("fp32", "(float32|fp32)")):
        leaf(**operands, work=work)


def test_strided_operands_are_refused() -> None:
    batch = paged(13, [20, 30])
    leaf = batch.leaf()
    work = leaf.prepare(batch.metadata([(0, 19, 20)]))
    q = torch.zeros(1, 4, 32, device=DEVICE)[..., ::2]
    with pytest.raises(ValueError, match="q must be contiguous"):
        leaf(q, batch.k_cache, batch.v_cache, work)


def test_more_query_heads_than_a_tile_has_rows_are_refused() -> None:
    site: CallSite = attention_site(
        "x", q_heads=129, kv_heads=1, head_dim=16, block_size=16, dtype="bfloat16"
    )
    with pytest.raises(LeafUnfit, match="129 query heads per kv head, a tile has 128 rows"):
        triton_leaf.build(site, hopper())


@pytest.mark.parametrize("field", ["positions", "block_tables", "merges", "slots", "tokens"])
def test_a_broken_work_list_does_not_give_the_same_rows(field: str) -> None:
    """Every array matters: two of its entries changed places, or one merge a slot fewer."""
    batch = grouped_batch()
    leaf = batch.leaf()
    leaf.builder.policy = POLICIES["both"]
    work = leaf.prepare(batch.metadata(batch.ends()))
    operands = (batch.queries(batch.ends()), batch.k_cache, batch.v_cache, work)
    want = leaf(*operands)
    assert_same_rows(leaf(*operands), want)
    array = getattr(work, field)
    if field == "merges":
        array[0, 2] -= 1
    else:
        array[[0, -1]] = array[[-1, 0]]
    with pytest.raises(AssertionError):
        assert_same_rows(leaf(*operands), want)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "head_dim"), [("bfloat16", 128), ("float16", 64)])
def test_a_group_of_samples_has_the_bits_of_each_alone_and_of_prefill(
    dtype: str, head_dim: int
) -> None:
    """16 samples of one prompt of 1024 tokens, 4 query heads per kv head, and two others."""
    answers = [1, 5, 64, 100, 255, 256, 257, 300, 511, 512, 700, 900, 999, 1, 2, 3]
    lengths = [*(1024 + answer for answer in answers), 777, 2300]
    forks = [None, *[(0, 1024)] * 15]
    batch = paged(21, lengths, forks=forks, q_heads=32, kv_heads=8, head_dim=head_dim, dtype=dtype)
    whole = dict(enumerate(batch.prefill()))
    assert_right(batch, batch.ends())
    for policy in (None, *POLICIES):
        assert_equal_rows(batch, batch.ends(), whole, policy)
    for i, start, end in batch.ends()[::5]:
        assert_equal_rows(batch, [(i, start, end)], whole)
        assert_equal_rows(batch, [(i, start - 40, end), (0, 900, 1000)], whole)
    assert_right(batch, [(i, n - 130, n) for i, n in enumerate(lengths)])


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_random_steps_have_the_bits_of_prefill(seed: int) -> None:
    rng = np.random.default_rng(seed)
    window = [None, int(rng.integers(1, 1500))][seed % 2]
    heads = [(32, 8), (14, 2), (8, 8), (40, 1)][seed]
    lengths = rng.integers(1, 1800, size=9).tolist()
    forks: list[tuple[int, int] | None] = [None]
    for i in range(1, 9):
        parent = int(rng.integers(0, i))
        shared = int(rng.integers(0, min(lengths[i], lengths[parent]) + 1))
        forks.append((parent, shared) if rng.random() < 0.7 else None)
    batch = paged(
        30 + seed,
        lengths,
        forks=forks,
        q_heads=heads[0],
        kv_heads=heads[1],
        head_dim=[128, 80, 64, 256][seed],
        dtype=["bfloat16", "float16"][seed // 2 % 2],
        window=window,
        block_size=[16, 48, 64, 256][seed],
    )
    whole = dict(enumerate(batch.prefill()))
    assert_right(batch, [(i, 0, n) for i, n in enumerate(lengths)])
    for _ in range(12):
        spans = []
        for i in rng.permutation(9)[: rng.integers(1, 10)].tolist():
            end = int(rng.integers(1, lengths[i] + 1))
            longest = int(rng.choice([1, 1, 1, 4, 40, 400]))
            spans.append((i, max(end - longest, 0), end))
        assert_equal_rows(batch, spans, whole, [None, *POLICIES][int(rng.integers(0, 6))])


@pytest.mark.gpu
def test_a_recorded_graph_serves_other_steps() -> None:
    lengths = [1024 + 150 * i for i in range(8)]
    batch = paged(
        40,
        lengths,
        forks=[None, *[(0, 1024)] * 7],
        q_heads=32,
        kv_heads=8,
        head_dim=128,
        dtype="bfloat16",
    )
    leaf = batch.leaf()
    work = leaf.reserve(capacity(batch, max_query_len=1, max_num_batched_tokens=16))
    q = torch.zeros(16, 32, 128, dtype=torch.bfloat16, device=DEVICE)
    work = leaf.refill(work, batch.metadata(batch.ends()), rows=16)
    leaf(q, batch.k_cache, batch.v_cache, work)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = leaf(q, batch.k_cache, batch.v_cache, work)
    for spans in itertools.chain(
        [batch.ends(), batch.ends()[:1], batch.ends()[3:5]],
        [[(i, n - 70 * i - 1, n - 70 * i) for i, n in enumerate(lengths)]],
    ):
        q.fill_(torch.nan)
        q[: len(spans)] = batch.queries(spans)
        leaf.refill(work, batch.metadata(spans), rows=16)
        out.fill_(torch.nan)
        graph.replay()
        assert_same_rows(out[: len(spans)], torch.cat(attend(batch, spans, "direct")))
        assert (out[len(spans) :] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("contracted", [False, True])
def test_contraction_would_change_rows_of_several_splits(
    contracted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 512,000 values in half precision; rounding hides the change in most of them."""
    batch = paged(41, [1000], q_heads=8, kv_heads=2, head_dim=128, dtype="float16")
    want = batch.attend([(0, 500, 1000)])[0]
    workshop = Workshop(triton_launch, "attend_items", tmp_path, monkeypatch)
    launched = workshop.launch_with(enable_fp_fusion=contracted)
    got = batch.attend([(0, 500, 1000)])[0]
    assert launched.count
    assert torch.equal(got, want) != contracted


@pytest.mark.gpu
def test_offsets_past_two_to_the_31_elements_are_reached() -> None:
    """A cache of more elements than an int32 counts, the sequence in its last blocks."""
    small = paged(42, [300], q_heads=4, kv_heads=2, head_dim=128, dtype="bfloat16")
    blocks = 2**31 // (2 * 16 * 128) + 40
    k_cache = torch.zeros(blocks, 2, 16, 128, dtype=torch.bfloat16, device=DEVICE)
    v_cache = torch.zeros_like(k_cache)
    moved = replace(small.metadata(small.ends()))
    tables = small.block_tables.clone()
    used = tables[0, : -(-300 // 16)]
    k_cache[used.long() + blocks - 30] = small.k_cache[used.long()]
    v_cache[used.long() + blocks - 30] = small.v_cache[used.long()]
    tables[0, : len(used)] = used + blocks - 30
    leaf = small.leaf()
    work = leaf.prepare(replace(moved, block_tables=tables))
    got = leaf(small.queries(small.ends()), k_cache, v_cache, work)
    assert_same_rows(got, small.attend(small.ends())[0])
