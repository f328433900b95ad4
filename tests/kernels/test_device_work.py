"""The work lists of attention on a device: every key once, from its own block, however packed."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedctl_kernels.ops.attention import device_groups, device_tiles, device_work
from pagedctl_kernels.ops.attention.device_tiles import Policy
from pagedctl_kernels.ops.attention.device_work import Capacity, DeviceWork, WorkBuilder
from pagedctl_kernels.ops.attention.units import Geometry
from pagedctl_kernels.ops.interfaces import AttentionMetadata
from tests.kernels import work_oracle

POLICY = Policy(programs=(528, 264, 66), state_cost=0.05, launch_cost=0)
FEW_PROGRAMS = Policy(programs=(24, 12, 6), state_cost=0.05, launch_cost=0)
WHOLE = replace(POLICY, cut=False)
MERGED = replace(WHOLE, resumed=False)
EAGER = Policy(programs=(10**6, 10**6, 10**6), state_cost=0, launch_cost=-1, slack=1)


@dataclass(frozen=True)
class Step:
    """Metadata, the geometry that it belongs to, and the blocks of its caches."""

    metadata: AttentionMetadata
    geometry: Geometry
    num_blocks: int

    def builder(self, policy: Policy = POLICY) -> WorkBuilder:
        return WorkBuilder(self.geometry, 16, policy, torch.device("cpu"))

    def check(self, work: DeviceWork) -> None:
        work_oracle.check(
            work,
            self.metadata,
            q_heads=self.geometry.q_heads,
            kv_heads=self.geometry.kv_heads,
            block_size=self.geometry.block_size,
            window=self.geometry.window,
            num_blocks=self.num_blocks,
        )


def make_step(
    lengths: Sequence[int],
    query_lens: Sequence[int] | None = None,
    *,
    forks: Sequence[tuple[int, int] | None] = (),
    block_size: int = 16,
    window: int | None = None,
    heads: tuple[int, int] = (8, 2),
    offset: int = 0,
) -> Step:
    """``forks``: entry i names an earlier sequence and how many keys of it sequence i continues.

    What no query sees is stale: negative, or a block that the caches do not have.
    """
    query_lens = [1] * len(lengths) if query_lens is None else query_lens
    blocks = [-(-length // block_size) for length in lengths]
    num_blocks = sum(blocks) + 2
    free = iter(np.random.default_rng(7).permutation(num_blocks).tolist())
    tables = np.full((len(lengths), max(blocks, default=0) + 2), -1, dtype=np.int32)
    tables[1::2] = num_blocks + 5
    for i, count in enumerate(blocks):
        tables[i, :count] = [next(free) for _ in range(count)]
        fork = forks[i] if i < len(forks) else None
        if fork is not None:
            shared = min(fork[1] // block_size, count, blocks[fork[0]])
            tables[i, :shared] = tables[fork[0], :shared]
    for i, (length, queries) in enumerate(zip(lengths, query_lens, strict=True)):
        if window is not None:
            tables[i, : max(length - queries - window + 1, 0) // block_size] = [-1, num_blocks][
                i % 2
            ]
    return Step(
        metadata=AttentionMetadata(
            query_start_loc=np.cumsum([offset, *query_lens]).astype(np.int32),
            seq_lens=np.array(lengths, dtype=np.int32),
            block_tables=tables,
        ),
        geometry=Geometry(
            q_heads=heads[0], kv_heads=heads[1], block_size=block_size, window=window
        ),
        num_blocks=num_blocks,
    )


def grpo_step(groups: int = 32, samples: int = 16, seed: int = 0) -> Step:
    """Samples of prompts of 1024 tokens, up to 2048 tokens into their answers."""
    rng = np.random.default_rng(seed)
    lengths = (1024 + rng.integers(1, 2048, groups * samples)).tolist()
    forks = [(i // samples * samples, 1024) if i % samples else None for i in range(len(lengths))]
    return make_step(lengths, forks=forks, heads=(32, 8))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    count = draw(st.integers(0, 9))
    lengths, query_lens = [], []
    forks: list[tuple[int, int] | None] = []
    for i in range(count):
        fork = (
            draw(st.none() | st.tuples(st.integers(0, i - 1), st.integers(0, 1500))) if i else None
        )
        forks.append(fork)
        base = lengths[fork[0]] if fork else 1
        near = st.integers(max(base - 40, 1), base + 40)
        edge = st.integers(1, 5).flatmap(lambda n: st.integers(256 * n - 1, 256 * n + 1))
        lengths.append(draw(st.integers(1, 1400) | near | edge))
        longest = lengths[-1]
        query_lens.append(
            draw(st.just(1) | st.integers(0, min(longest, 5)) | st.integers(0, longest))
        )
    step = make_step(
        lengths,
        query_lens,
        forks=forks,
        block_size=draw(st.sampled_from([1, 3, 16, 48, 64, 128, 256])),
        window=draw(st.none() | st.integers(1, 900)),
        heads=draw(st.sampled_from([(8, 2), (4, 4), (6, 2), (32, 1), (128, 1), (5, 1)])),
        offset=draw(st.sampled_from([0, 0, 0, 3])),
    )
    for _ in range(draw(st.integers(0, 3))):
        # One equal entry says nothing about those before it, however the sharing was guessed.
        row = st.integers(0, max(count - 1, 0))
        column = draw(st.integers(0, step.metadata.block_tables.shape[1] - 1))
        if count:
            tables = step.metadata.block_tables
            tables[draw(row), column] = tables[draw(row), column]
    return replace(step, metadata=with_valid_tables(step))


def with_valid_tables(step: Step) -> AttentionMetadata:
    """Entries that a query sees made blocks of the caches (a copied one may be stale)."""
    metadata, geometry = step.metadata, step.geometry
    tables = np.array(metadata.block_tables)
    for token in work_oracle.queries(metadata, geometry.window).values():
        size = geometry.block_size
        seen = tables[token.sequence, token.lowest // size : token.position // size + 1]
        seen[(seen < 0) | (seen >= step.num_blocks)] = 0
    return replace(metadata, block_tables=tables)


@settings(deadline=None, max_examples=300)
@given(step=steps(), policy=st.sampled_from([POLICY, WHOLE, MERGED, FEW_PROGRAMS, EAGER]))
def test_every_seen_key_is_read_once_from_its_own_block(step: Step, policy: Policy) -> None:
    step.check(step.builder(policy).prepare(step.metadata))


@settings(deadline=None, max_examples=60)
@given(listed=st.lists(steps(), min_size=1, max_size=3), slots=st.sampled_from([0, 1, 7, 40, 2000]))
def test_reserved_memory_takes_one_step_after_another(listed: list[Step], slots: int) -> None:
    """A step keeps only as many states as there is room for; the capacity of items suffices."""
    first = listed[0]
    work = None
    for step in listed:
        if step.geometry != first.geometry:
            continue
        builder = step.builder(EAGER)
        work = work or builder.reserve(roomy(listed, slots))
        tokens = int(np.asarray(step.metadata.query_start_loc)[-1])
        memory = work.buffer.data_ptr()
        filled = builder.refill(work, step.metadata, tokens + 3)
        assert filled.buffer.data_ptr() == memory
        assert filled.rows == tokens + 3
        step.check(filled)


def roomy(listed: Sequence[Step], slots: int) -> Capacity:
    return Capacity(
        max_num_seqs=max(len(step.metadata.seq_lens) for step in listed),
        max_num_batched_tokens=max(int(s.metadata.query_start_loc[-1]) for s in listed) + 3,
        max_query_len=1500,
        max_blocks=max(step.metadata.block_tables.shape[1] for step in listed),
        num_blocks=max(step.num_blocks for step in listed),
        max_slots=slots,
    )


def test_samples_of_one_prompt_read_it_once() -> None:
    step = grpo_step()
    work = step.builder().prepare(step.metadata)
    step.check(work)
    items, _, _, _ = work_oracle.live(work)
    shared = [item for item in items if len(item.tokens) > 1]
    assert [(item.rows, item.first, item.end) for item in shared] == [(64, 0, 4)] * 32
    assert all(len({token // 16 for token in item.tokens}) == 1 for item in shared)
    tails = [item for item in items if len(item.tokens) == 1]
    assert all(item.first == 4 and item.resumes and not item.keeps for item in tails)
    assert len(tails) == 512


def test_samples_share_at_the_level_of_the_tree_that_saves_most() -> None:
    """48 sequences continue one system prompt of 512 tokens; each 16 share 512 more."""
    forks: list[tuple[int, int] | None] = [None]
    forks += [(0, 512) if i % 16 == 0 else (i // 16 * 16, 1024) for i in range(1, 48)]
    order = np.random.default_rng(0).permutation(48)
    step = make_step([1100] * 48, forks=forks)
    tables = np.asarray(step.metadata.block_tables)[order]
    step = replace(step, metadata=replace(step.metadata, block_tables=tables))
    work = step.builder(WHOLE).prepare(step.metadata)
    step.check(work)
    items, _, _, _ = work_oracle.live(work)
    shared = [item for item in items if len(item.tokens) > 1]
    assert [(len(item.tokens), item.end) for item in shared] == [(16, 4)] * 3
    assert {frozenset(order[list(item.tokens)] // 16) for item in shared} == {
        frozenset({group}) for group in range(3)
    }


def test_samples_share_what_their_windows_leave() -> None:
    """They are at other positions, so each sees another first block of the shared ones."""
    lengths = [1100 + 20 * i for i in range(8)]
    step = make_step(lengths, forks=[None, *[(0, 1024)] * 7], window=500)
    work = step.builder(WHOLE).prepare(step.metadata)
    step.check(work)
    items, _, _, _ = work_oracle.live(work)
    shared = [(len(item.tokens), item.first, item.end) for item in items if len(item.tokens) > 1]
    assert shared == [(8, 2, 4)]


def test_sharing_that_saves_less_than_a_launch_is_left_alone() -> None:
    step = make_step([600, 600], forks=[None, (0, 512)])
    for cost, kept in ((3.9, 2), (4.0, 0)):
        policy = replace(WHOLE, launch_cost=cost, state_cost=0)
        assert len(step.builder(policy).prepare(step.metadata).state_m) == kept


def test_a_group_of_more_rows_than_a_tile_becomes_equal_parts() -> None:
    step = make_step([600] * 20, forks=[None, *[(0, 512)] * 19])
    work = step.builder(WHOLE).prepare(step.metadata)
    items, _, _, _ = work_oracle.live(work)
    assert sorted(len(item.tokens) for item in items if len(item.tokens) > 1) == [10, 10]


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [1000, 2500, 4096])
def test_few_long_sequences_are_spread_over_the_device(rows: int, length: int) -> None:
    step = make_step([length] * rows, heads=(32, 8))
    work = step.builder().prepare(step.metadata)
    step.check(work)
    splits = -(-length // 256) * rows * 8
    items, _, _, _ = work_oracle.live(work)
    assert len(items) * 8 >= min(splits, 528) * 0.6
    assert max(item.end - item.first for item in items) <= 2 * -(-splits // 528)


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        (grpo_step(), 1.2),
        (grpo_step(samples=3, groups=4), 2),
        (make_step(np.random.default_rng(1).integers(150, 4500, 64).tolist(), heads=(32, 8)), 2),
        (make_step([2048] * 8, [2048] * 8, heads=(32, 8)), 1.2),
        (make_step([9000, *range(100, 2000, 100)], [200, *[1] * 19], heads=(32, 8)), 3),
    ],
    ids=["grpo", "few groups", "rollout", "prefill", "chunk among decodes"],
)
def test_no_program_works_much_longer_than_the_mean(step: Step, factor: float) -> None:
    """By key tiles, within each tile height, on as many programs as fill the device; tiles of many
    tokens are left longer, since cutting them costs states."""
    work = step.builder().prepare(step.metadata)
    step.check(work)
    programs = {16: 528, 64: 264, 128: 66}
    for rows, number in programs.items():
        found = work_oracle.loads(work, step.geometry.kv_heads, number)
        if rows in found:
            most, mean = found[rows]
            assert most <= factor * mean + 4, rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_num_seqs": 1}, "2 sequences, the work list is for 1"),
        ({"max_num_batched_tokens": 8}, "9 rows, the work list is for 8"),
        ({"max_query_len": 3}, "4 tokens in a query, the work list is for 3"),
        ({"max_blocks": 18}, "19 blocks in a sequence, the work list is for 18"),
        ({"num_blocks": 2}, r"\d+ blocks in the caches, the work list is for 2"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(change: dict[str, int], message: str) -> None:
    step = make_step([40, 300], [1, 4])
    builder = step.builder()
    work = builder.reserve(replace(roomy([step], 4), **{"max_num_batched_tokens": 9, **change}))
    with pytest.raises(ValueError, match=message):
        builder.refill(work, step.metadata, 9)


@pytest.mark.parametrize("heads", [(20, 1), (32, 1), (64, 2)])
@pytest.mark.parametrize(("max_query_len", "tallest"), [(1, 128), (1, 64), (1500, 64)])
def test_groups_whose_tokens_fill_a_tile_of_64_rows_fit_a_reserved_list(
    heads: tuple[int, int], max_query_len: int, tallest: int
) -> None:
    """Up to three tokens fit there: the tails of a group then lie in one class with its prefix,
    unless the group is raised."""
    pairs = [fork for first in range(0, 64, 2) for fork in (None, (first, 4096))]
    step = make_step([4300, 4400] * 32, forks=pairs, heads=heads)
    builder = step.builder(replace(POLICY, tallest=tallest))
    capacity = replace(roomy([step], 400), max_query_len=max_query_len)
    work = builder.refill(builder.reserve(capacity), step.metadata, 64)
    step.check(work)
    assert work.item_counts.tolist() == [64, 32]


@pytest.mark.parametrize(
    ("starts", "message"),
    [([-1, 0], "sequence 0: query_start_loc begins below 0"), ([-2, -1], "begins below 0")],
)
def test_queries_that_begin_below_zero_are_refused(starts: list[int], message: str) -> None:
    step = make_step([40])
    wrong = replace(step.metadata, query_start_loc=np.array(starts, dtype=np.int32))
    builder = step.builder()
    with pytest.raises(ValueError, match=message):
        builder.prepare(wrong)
    with pytest.raises(ValueError, match=message):
        builder.refill(builder.reserve(roomy([step], 4)), wrong, 1)


def test_a_block_that_no_int32_names_is_refused() -> None:
    step = make_step([40])
    tables = np.asarray(step.metadata.block_tables).astype(np.int64)
    tables[0, 1] += 2**32
    with pytest.raises(ValueError, match=f"its block table names {tables[0, 1]}"):
        step.builder().prepare(replace(step.metadata, block_tables=tables))


def test_more_queries_than_rows_and_lists_of_fixed_length_are_refused() -> None:
    step = make_step([40, 300], [1, 4])
    builder = step.builder()
    with pytest.raises(ValueError, match="5 query tokens, the work list is for 4"):
        builder.refill(builder.reserve(roomy([step], 4)), step.metadata, 4)
    with pytest.raises(ValueError, match="only a reserved work list"):
        builder.refill(builder.prepare(step.metadata), step.metadata, 5)


def test_tiles_that_were_not_reserved_are_refused() -> None:
    step = make_step([300], [32])
    builder = step.builder(replace(POLICY, programs=(1, 1, 1), tallest=64))
    work = builder.reserve(roomy([step], 4))
    step.check(builder.refill(work, step.metadata, 32))
    builder.policy = replace(builder.policy, tallest=128)
    with pytest.raises(ValueError, match="no tiles of 128 rows"):
        builder.refill(work, step.metadata, 32)


def test_decode_alone_has_no_tall_tiles() -> None:
    step = make_step([40, 300])
    work = step.builder().reserve(replace(roomy([step], 4), max_query_len=1))
    assert [tile_class.rows for tile_class in work.classes] == [16, 64]


def test_prefill_tiles_are_as_tall_as_the_policy_and_the_programs_allow() -> None:
    step = make_step([500], [500], heads=(32, 8))
    for tallest, programs, rows in ((128, 100, 128), (128, 200, 64), (64, 1, 64)):
        policy = replace(POLICY, tallest=tallest, programs=(1, programs, programs))
        work = step.builder(policy).prepare(step.metadata)
        assert [tile_class.rows for tile_class in work.classes] == [rows]
        step.check(work)


def test_a_negative_block_that_a_query_sees_is_refused() -> None:
    step = make_step([40, 300])
    tables = np.array(step.metadata.block_tables)
    tables[1, 4] = -1
    with pytest.raises(ValueError, match="sequence 1: its block table names -1"):
        step.builder().prepare(replace(step.metadata, block_tables=tables))


@dataclass(frozen=True)
class Mutant:
    """A function of the builder with one piece of its text replaced."""

    where: ModuleType
    name: str
    old: str
    new: str


MUTANTS = [
    Mutant(device_groups, "_common_splits", "(tables[1:], tables[:-1]", "(tables[1:], tables[1:]"),
    Mutant(device_groups, "_common_splits", "np.minimum.reduceat", "np.maximum.reduceat"),
    Mutant(device_groups, "_cut_groups", "end_of[members[first]]", "end_of[members[first]] + 1"),
    Mutant(device_groups, "_cut_groups", "(group_of, first_block)", "(group_of, -first_block)"),
    Mutant(device_tiles, "_first_key", "window + 1", "window + 257"),
    Mutant(device_tiles, "_group_tiles", "table_row[leader]", "table_row[begins]"),
    Mutant(device_tiles, "_group_tiles", "maximum.reduceat(whole.e", "minimum.reduceat(whole.e"),
    Mutant(device_tiles, "_tails", "group[left] < 0", "group[left] < 1"),
    Mutant(device_tiles, "_tails", "group[left] + len(left)", "group[left]"),
    Mutant(device_tiles, "_tails", "first[groups.members] =", "first[groups.members] = 1 +"),
    Mutant(device_tiles, "build_tiles", "position // SPLIT_TOKENS + 1", "(position + 255) // 256"),
    Mutant(device_tiles, "_prefill_tiles", "computed + stop - 1,", "computed + begin,"),
    Mutant(device_tiles, "_prefill_tiles", "(place + 1) // runs[of]", "place // runs[of] + 1"),
    Mutant(device_tiles, "_classes", "np.searchsorted(room, tiles.counts)", "0 * tiles.counts"),
    Mutant(device_tiles, "_classes", "np.searchsorted(room, 1) + 1", "np.searchsorted(room, 1)"),
    Mutant(device_tiles, "_cut_tiles", "& (opening == splits)[tiles.follows]", "& True"),
    Mutant(device_tiles, "_cut", "single + 1]", "single + 2]"),
    Mutant(device_tiles, "_cut", ", splits - opening", ", splits - opening - 1"),
    Mutant(device_tiles, "_cut_tiles", "0, KEEPS)", "KEEPS, 0)"),
    Mutant(device_tiles, "_cut_tiles", "== cut.num_opening", "> -1"),
    Mutant(device_tiles, "_cut_tiles", "resumes * RESUMES", "0 * resumes"),
    Mutant(device_tiles, "_cut_tiles", "PLIT - end_tile,", "PLIT + end_tile,"),
    Mutant(device_tiles, "_assign_slots", "1 + first", "first"),
    Mutant(device_tiles, "_assign_slots", "base = np.cumsum(count) - count", "base = count"),
    Mutant(device_tiles, "_assign_slots", "tokens[single]", "tokens[~single]"),
    Mutant(device_tiles, "_assign_slots", "flag & KEEPS == 0", "flag == 0"),
    Mutant(device_tiles, "_assign_slots", "flag & RESUMES > 0", "flag > 3"),
    Mutant(device_work, "used_tables", "block < end", "block <= end"),
    Mutant(device_work, "used_tables", "geometry.window + 1", "geometry.window + 300"),
]  # fmt: skip


def battery() -> None:
    """Steps that reach every branch of the builder, each by the oracle."""
    tree = [None, (0, 512), (0, 512), (2, 800), (2, 800), None, (5, 300), (0, 270)]
    for window in (None, 300, 600):
        decodes = make_step([900, 900, 1030, 1030, 1200, 512, 513, 290], forks=tree, window=window)
        mixed = make_step(
            [900, 30, 1030, 1030, 1200, 512, 513, 700],
            [1, 30, 1, 70, 1, 1, 1, 5],
            forks=tree,
            window=window,
        )
        lengths = [*range(255, 265), *range(510, 515), *[300] * 5]
        group = make_step(lengths, forks=[None, *[(0, 600)] * 19], window=window)
        pair = make_step([1, 1, 256, 257, 1], forks=[None, None, None, (2, 256)], window=window)
        for step in (decodes, mixed, group, pair):
            for policy in (POLICY, WHOLE, MERGED, FEW_PROGRAMS, EAGER):
                step.check(step.builder(policy).prepare(step.metadata))
    trap = make_step([600, 600, 600], forks=[None, None, (1, 512)])
    trap.metadata.block_tables[0, 15] = trap.metadata.block_tables[1, 15]
    trap.check(trap.builder(EAGER).prepare(trap.metadata))


def test_the_oracle_accepts_the_builder() -> None:
    battery()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.name}: {mutant.new}")
def test_the_oracle_refuses_a_broken_builder(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = textwrap.dedent(inspect.getsource(getattr(mutant.where, mutant.name)))
    assert mutant.old in source
    namespace = dict(vars(mutant.where))
    exec("from __future__ import annotations\n" + source.replace(mutant.old, mutant.new), namespace)
    reached: list[None] = []
    broken: Callable[..., Any] = namespace[mutant.name]

    def counted(*operands: Any, **named: Any) -> Any:
        reached.append(None)
        return broken(*operands, **named)

    monkeypatch.setattr(mutant.where, mutant.name, counted)
    with pytest.raises((AssertionError, IndexError, KeyError, ValueError)):
        battery()
    assert reached
