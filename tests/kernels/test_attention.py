"""Attention over block tables: right against float64, and the same bits in every batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagedctl_kernels.ops.attention import tiles, torch_reference, units
from pagedctl_kernels.ops.interfaces import AttentionMetadata
from pagedctl_kernels.registry import NoLeafError
from tests.kernels import reference
from tests.kernels.harness import DTYPES, Paged, Sequences, assert_same_bits, sequences, threads
from tests.kernels.reference import assert_close, to_numpy

LENGTHS = [1, 17, 63, 64, 65, 130, 255, 256, 257, 300]


def dense(batch: Sequences, sequence: int, window: int | None) -> np.ndarray[Any, Any]:
    """Every row of one sequence, [L, Hq, Dh], by the reference."""
    q, k, v = (to_numpy(part[sequence]) for part in (batch.q, batch.k, batch.v))
    group = q.shape[1] // k.shape[1]
    return np.stack(
        [
            [
                reference.attend(q[p, h], k[:, h // group], v[:, h // group], p, window)
                for h in range(q.shape[1])
            ]
            for p in range(len(q))
        ]
    )


def check_all(batch: Sequences, window: int | None = None, **paging: Any) -> None:
    dtype = str(batch.q[0].dtype).removeprefix("torch.")
    for sequence, rows in enumerate(Paged(batch, window=window, **paging).prefill()):
        assert_close("attention", dtype, rows, dense(batch, sequence, window))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_equals_the_float64_softmax(dtype: str) -> None:
    check_all(sequences(1, [1, 63, 65, 300], dtype=dtype))


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 100, 256, 257, 1000])
def test_a_window_counts_the_query_itself_and_hides_everything_older(window: int) -> None:
    check_all(sequences(2, [1, 65, 300], q_heads=2), window)


@pytest.mark.parametrize("group", range(1, 9))
def test_every_group_size_reads_its_own_kv_head(group: int) -> None:
    check_all(sequences(3, [5, 70], q_heads=2 * group, kv_heads=2))


@pytest.mark.parametrize("head_dim", [8, 24, 64, 96, 128])
def test_every_head_dim_is_scaled_by_its_square_root(head_dim: int) -> None:
    check_all(sequences(4, [5, 70], head_dim=head_dim))


@pytest.mark.parametrize(
    ("head_dim", "refusal"),
    [
        (1, "head_dim 1 is below 8"),
        (6, "head_dim 6 is below 8"),
        (9, "head_dim 9 is not a multiple of 8"),
        (12, "head_dim 12 is not a multiple of 8"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_head_dim_that_no_tile_product_serves_is_refused_by_its_limit(
    dtype: str, head_dim: int, refusal: str
) -> None:
    """Not by a machine's check: which other head_dims keep their bits differs by dtype."""
    with pytest.raises(NoLeafError, match=refusal):
        Paged(sequences(4, [5], head_dim=head_dim, dtype=dtype)).leaf()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", range(8, 136, 8))
def test_every_head_dim_within_the_limit_has_a_leaf(head_dim: int, dtype: str) -> None:
    assert Paged(sequences(4, [5], head_dim=head_dim, dtype=dtype)).leaf().head_dim == head_dim


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 48, 64, 128, 256])
@pytest.mark.parametrize("window", [None, 50])
def test_block_size_and_physical_order_of_blocks_change_no_bit(
    block_size: int, window: int | None
) -> None:
    batch = sequences(5, [1, 70, 300])
    want = Paged(batch, block_size=16, window=window).prefill()
    for seed in (1, 2):
        paged = Paged(batch, block_size=block_size, seed=seed, window=window)
        for got, expected in zip(paged.prefill(), want, strict=True):
            assert_same_bits(got, expected, f"block_size {block_size}")


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "window"),
    [("float32", None), ("bfloat16", 70), ("float16", None), ("float64", 70)],
)
def test_decode_chunks_and_prefill_give_the_same_bits(
    dtype: str, window: int | None, count: int
) -> None:
    batch = sequences(6, [300, 5, 129], dtype=dtype)
    paged = Paged(batch, window=window)
    with threads(count):
        whole = paged.prefill()
        spans = [(p, p + 1) for p in (0, 1, 62, 63, 64, 100, 255, 256, 299)]
        spans += [
            (start, min(start + size, 300))
            for size in (23, 64, 100)
            for start in range(0, 300, size)
        ]
        for start, end in spans:
            (rows,) = paged.attend([(0, start, end)])
            assert_same_bits(rows, whole[0][start:end], f"{start}..{end}")


def test_a_row_has_the_same_bits_alone_packed_and_permuted() -> None:
    batch = sequences(7, LENGTHS)
    paged = Paged(batch)
    alone = [paged.attend([(i, n - 1, n)])[0] for i, n in enumerate(LENGTHS)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        order = torch.randperm(len(LENGTHS), generator=generator).tolist()
        spans = [(i, LENGTHS[i] - 1, LENGTHS[i]) for i in order]
        for i, rows in zip(order, paged.attend(spans), strict=True):
            assert_same_bits(rows, alone[i], f"sequence {i}")
    mixed = paged.attend([(9, 40, 290), (8, 256, 257), (3, 0, 64), (0, 0, 1)])
    assert_same_bits(mixed[1], alone[8])
    assert_same_bits(mixed[3], alone[0])


def test_threads_one_and_two_give_the_same_bits() -> None:
    paged = Paged(sequences(8, LENGTHS))
    with threads(1):
        one = paged.prefill()
    with threads(2):
        two = paged.prefill()
    for left, right in zip(one, two, strict=True):
        assert_same_bits(left, right)


@pytest.mark.parametrize("window", [None, 65])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_skipped_tiles_and_splits_equal_computed_ones(
    monkeypatch: pytest.MonkeyPatch, dtype: str, window: int | None
) -> None:
    batch = sequences(9, [1, 63, 300, 520], dtype=dtype)
    paged = Paged(batch, window=window)
    spans = [(0, 0, 1), (1, 20, 63), (2, 299, 300), (3, 500, 520)]
    skipped = paged.attend(spans)
    calls: list[int] = []

    def everything(positions: units.Ints, window: int | None) -> tuple[units.Ints, units.Ints]:
        calls.append(len(positions))
        last = positions.max(axis=1) // 256 * 4 + 4
        return np.zeros_like(last), last

    monkeypatch.setattr(units, "tile_range", everything)
    computed = paged.attend(spans)
    assert calls
    for left, right in zip(skipped, computed, strict=True):
        assert_same_bits(left, right)


def test_small_chunks_of_units_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = Paged(sequences(10, [300, 520, 20], q_heads=2, kv_heads=1))
    want = paged.prefill()
    monkeypatch.setattr(torch_reference, "KEY_BYTES_AT_ONCE", 1)
    for got, expected in zip(paged.prefill(), want, strict=True):
        assert_same_bits(got, expected)


def test_short_blocks_of_rows_give_the_full_block_s_bits() -> None:
    paged = Paged(sequences(11, [300, 40], q_heads=6, kv_heads=2))
    leaf = paged.leaf()
    assert leaf.short_blocks == (4, 8)
    spans = [(0, 299, 300), (1, 38, 40)]
    short = paged.attend(spans)
    long = paged.leaf()
    long.short_blocks = ()
    paged.leaf = lambda: long  # type: ignore[method-assign]
    for got, expected in zip(short, paged.attend(spans), strict=True):
        assert_same_bits(got, expected)


def test_unwritten_slots_and_stale_table_entries_are_never_seen() -> None:
    batch = sequences(12, [1, 70, 300])
    paged = Paged(batch, window=40)
    want = paged.attend([(2, 290, 300), (1, 69, 70)])
    paged.block_tables[2, :15] = -1
    paged.k_cache[paged.block_tables[2, 16].long(), :, :4] = torch.inf
    for got, expected in zip(paged.attend([(2, 299, 300), (1, 69, 70)]), want, strict=True):
        assert_same_bits(got[-1:], expected[-1:])
        assert got.isfinite().all()


def test_another_sequence_s_poison_stays_with_it() -> None:
    batch = sequences(13, [33, 33, 33])
    want = Paged(batch).prefill()
    batch.q[1][:], batch.k[1][:], batch.v[1][:] = torch.nan, torch.nan, torch.inf
    got = Paged(batch).prefill()
    assert_same_bits(got[0], want[0])
    assert_same_bits(got[2], want[2])
    assert got[1].isnan().all()


def test_rows_past_the_metadata_give_zeros_and_an_idle_sequence_none() -> None:
    paged = Paged(sequences(14, [20, 30]))
    leaf = paged.leaf()
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, 2, 2], dtype=torch.int32),
        seq_lens=torch.tensor([20, 30], dtype=torch.int32),
        block_tables=paged.block_tables,
    )
    q = torch.cat([paged.batch.q[0][18:], torch.full((3, 4, 16), torch.nan)])
    out = leaf(q, paged.k_cache, paged.v_cache, leaf.prepare(metadata))
    assert_same_bits(out[:2], paged.attend([(0, 18, 20)])[0])
    assert (out[2:] == 0).all()


def test_softmax_p_dtype_changes_bfloat16_values() -> None:
    batch = sequences(15, [100], dtype="bfloat16")
    model = Paged(batch).prefill()[0]
    wide = Paged(batch, softmax_p_dtype="float32").prefill()[0]
    assert not torch.equal(model, wide)
    assert_close("attention", "bfloat16", wide, dense(batch, 0, None))


def test_a_zero_output_has_a_positive_sign() -> None:
    batch = sequences(16, [70])
    batch.v[0][:] = -0.0
    assert not torch.signbit(Paged(batch).prefill()[0]).any()


def test_the_formula_is_followed_operation_by_operation() -> None:
    """One decode row of 300 keys, written out tile by tile with scalars and vectors."""
    batch = sequences(17, [300], q_heads=1, kv_heads=1, dtype="bfloat16")
    got = Paged(batch).attend([(0, 299, 300)])[0][0, 0]
    q, k, v = (part[0].float()[:, 0] for part in (batch.q, batch.k, batch.v))
    block = torch.zeros(16, 16)
    block[0] = q[299]
    scale = np.float32(np.log2(np.e) / np.sqrt(16))
    merged = None
    for split in (0, 256):
        m, total, acc = torch.tensor(-torch.inf), torch.tensor(0.0), torch.zeros(16)
        for start in range(split, min(split + 256, 300), 64):
            keys, values = torch.zeros(64, 16), torch.zeros(64, 16)
            count = min(64, 300 - start)
            keys[:count], values[:count] = k[start : start + count], v[start : start + count]
            z = torch.mm(block, keys.t())[0] * scale
            z[count:] = -torch.inf
            new = torch.maximum(m, z.max())
            f = tiles.exp2(m - new)
            p = tiles.exp2(z - new).bfloat16().float()
            total = total * f + tiles.halving_tree_sum(p)
            acc = acc * f + torch.mm(torch.cat([p.view(1, 64), torch.zeros(15, 64)]), values)[0]
            m = new
        if merged is None:
            merged = (m, total, acc)
            continue
        big = torch.maximum(merged[0], m)
        f, g = tiles.exp2(merged[0] - big), tiles.exp2(m - big)
        merged = (big, merged[1] * f + total * g, merged[2] * f + acc * g)
    assert merged is not None
    assert_same_bits(got, ((merged[2] + 0) / merged[1]).bfloat16())


def test_exp2_is_exact_where_the_proof_of_empty_tiles_needs_it() -> None:
    values = tiles.exp2(torch.tensor([-torch.inf, 0.0, -0.0] * 11))
    assert_same_bits(values, torch.tensor([0.0, 1.0, 1.0] * 11))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_lens": [2, 30]}, "sequence 0: the query is longer than the sequence"),
        ({"seq_lens": [20, 99]}, "sequence 1: the block table is shorter than the sequence"),
        ({"query_start_loc": [0, 3, 2]}, "sequence 1: query_start_loc must not descend"),
        ({"seq_lens": [20]}, r"1 seq_lens need query_start_loc \[2\]"),
        ({"block_tables": [[0, 9], [1, 2]]}, r"name blocks 0..9, the caches hold 7 and 7"),
    ],
)
def test_inconsistent_metadata_is_refused(change: dict[str, Any], message: str) -> None:
    paged = Paged(sequences(18, [20, 30]))
    fields = {
        "query_start_loc": [0, 3, 4],
        "seq_lens": [20, 30],
        "block_tables": paged.block_tables.numpy(),
        **change,
    }
    metadata = AttentionMetadata(**{k: np.asarray(v, dtype=np.int32) for k, v in fields.items()})
    leaf = paged.leaf()
    q = torch.zeros(4, 4, 16)
    with pytest.raises(ValueError, match=message):
        leaf(q, paged.k_cache, paged.v_cache, leaf.prepare(metadata))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_random_compositions_of_one_batch_give_the_same_bits(seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 800, size=6).tolist()
    window = [None, int(generator.integers(1, 400))][seed % 2]
    heads = [(4, 2), (9, 3), (8, 1), (5, 5)][seed % 4]
    dtype = DTYPES[seed % 4]
    batch = sequences(seed, lengths, q_heads=heads[0], kv_heads=heads[1], dtype=dtype)
    paged = Paged(batch, window=window, block_size=int(generator.integers(1, 257)))
    whole = paged.prefill()
    for sequence, rows in enumerate(whole):
        assert_close("attention", dtype, rows, dense(batch, sequence, window))
    for _ in range(10):
        spans = []
        for sequence in generator.permutation(6)[: generator.integers(1, 7)].tolist():
            start = int(generator.integers(0, lengths[sequence]))
            spans.append((sequence, start, int(generator.integers(start, lengths[sequence])) + 1))
        for (sequence, start, end), rows in zip(spans, paged.attend(spans), strict=True):
            assert_same_bits(rows, whole[sequence][start:end])
