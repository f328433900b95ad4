"""Every place where the engine might choose by the batch: listed, and seen not to.

pegainfer-project/pegainfer#414 found four in one engine: the projection's algorithm by the number
of rows, the KV split count by the live batch, the attention path, and decode beside prefill.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from pagedctl.engine.request import Request, SamplingParams
from pagedctl.models.binding import DecoderPlans
from pagedctl.verify.planted_faults import planted_faults
from pagedctl.verify.selection_points import SelectionPoint, selection_points
from pagedctl_kernels.catalogue import house_registry
from pagedctl_kernels.ops.attention import torch_reference as attention
from pagedctl_kernels.ops.attention import units
from pagedctl_kernels.ops.attention.torch_reference import TorchAttention
from pagedctl_kernels.ops.interfaces import AttentionMetadata
from pagedctl_kernels.ops.torch_checks import int_fact, operand_dtype
from pagedctl_kernels.plan import Plan
from tests.reference.tiny_models import VOCAB, tiny_model
from tests.verify.power_harness import engine_over

SITES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "head")
DTYPES = ("float32", "bfloat16", "float16")
MOST_ROWS = 64
BLOCK = 16
ALL_CASES = frozenset(
    {
        *("alone", "packed", "repeat", "process", "chunks", "pools", "preemption", "prefix"),
        *("rescore", "sampled"),
    }
)
NINE_CLASSES = {
    "attention split": "measured",
    "attention library by batch size": "measured",
    "GEMM tactic of o_proj 64x48": "measured",
    "grouped GEMM tactic": "not applicable",
    "MoE finalise": "not applicable",
    "all-reduce strategy by size": "not applicable",
    "graph padding ladder": "not applicable",
    "chunk boundary": "measured",
    "prefix-reuse boundary": "measured",
    "RNG of unseeded requests": "measured",
}


@cache
def plans_of(dtype: str, *, faulty: bool = False) -> DecoderPlans:
    """The bound plans of a tiny model; with the planted matrix product if *faulty*."""
    registry = planted_faults(house_registry())[0].registry if faulty else None
    with (
        TemporaryDirectory() as folder,
        engine_over(tiny_model("qwen3"), Path(folder), dtype=dtype, registry=registry) as engine,
    ):
        return engine.parts.plans


def points(folder: Path, cases: frozenset[str], **options: Any) -> dict[str, SelectionPoint]:
    with engine_over(tiny_model("qwen3"), folder, **options) as engine:
        found = selection_points(engine, cases)
    assert len({one.name for one in found}) == len(found)
    return {one.name: one for one in found}


# -- the checklist ---------------------------------------------------------------------------


def test_the_checklist_has_a_line_for_each_of_the_nine_known_classes(tmp_path: Path) -> None:
    """NVIDIA/TensorRT-LLM#19501: chunk and reuse boundary are one class there, two lines here."""
    found = points(tmp_path, ALL_CASES)
    assert {name: found[name].standing for name in NINE_CLASSES} == NINE_CLASSES
    assert all(one.text and "\n" not in one.text for one in found.values())


def test_a_point_is_measured_only_by_a_case_that_ran(tmp_path: Path) -> None:
    none, packed = points(tmp_path, frozenset()), points(tmp_path, frozenset({"packed"}))
    everything = points(tmp_path, ALL_CASES)
    assert not any(one.standing == "measured" for one in none.values())
    assert packed["chunk boundary"].standing == "pinned"
    assert everything["chunk boundary"].text.endswith("varied by chunks")
    assert packed["attention split"].text.endswith("varied by packed")
    assert none["lag of the host"].standing == "open"
    assert not any(one.standing == "open" for one in everything.values())


def test_a_matrix_product_is_listed_with_the_leaf_that_serves_it(tmp_path: Path) -> None:
    plans = plans_of("float32")
    found = points(tmp_path, frozenset())
    for site in SITES:
        plan: Plan = getattr(plans, site)
        shape = f"{plan.site.facts['k']}x{plan.site.facts['n']}"
        assert plan.leaf.name in found[f"GEMM tactic of {plan.site.name} {shape}"].text


def test_nothing_pins_what_the_contract_does_not(tmp_path: Path) -> None:
    """Under fast a leaf that follows the batch may be bound, and threads and TF32 are free."""
    chosen = {"numerics": "fast", "leaf": ("gemm=torch.gemm_library",)}
    found = points(tmp_path, frozenset(), **chosen)
    ran = points(tmp_path, ALL_CASES, **chosen)
    site = "GEMM tactic of o_proj 64x48"
    assert found[site].standing == "open"
    assert (ran[site].standing, "nothing pins it" in ran[site].text) == ("measured", True)
    assert found["TF32 and narrowed float32"].standing == "open"
    assert found["threads of a product"].standing == "open"


def test_a_prefix_cache_that_is_off_is_no_place_to_choose(tmp_path: Path) -> None:
    off = points(tmp_path, frozenset(), prefix_cache=False)["prefix-reuse boundary"]
    assert (off.standing, off.text) == ("pinned", "the prefix cache is off")


# -- projections at 1 to 64 rows -------------------------------------------------------------


def moved_row_counts(plans: DecoderPlans, site: str) -> list[int]:
    """The numbers of rows among which one row of the product at *site* has other bits."""
    plan: Plan = getattr(plans, site)
    k, n = int_fact(plan.site, "k"), int_fact(plan.site, "n")
    generator = torch.Generator().manual_seed(3)
    dtype = operand_dtype(plan.site, "x")
    x = torch.randn(MOST_ROWS, k, generator=generator).to(dtype)
    prepared = plan.run.prepare(torch.randn(n, k, generator=generator).to(dtype), None)
    alone = plan.run(x[-1:], prepared)
    counts = range(1, MOST_ROWS + 1)
    return [rows for rows in counts if not torch.equal(plan.run(x[-rows:], prepared)[-1:], alone)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("site", SITES)
def test_a_projection_is_independent_of_the_number_of_rows(site: str, dtype: str) -> None:
    """pegainfer-project/pegainfer#414: one row among 1 to 64."""
    assert moved_row_counts(plans_of(dtype), site) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("site", SITES[:-1])
def test_a_product_whose_split_follows_the_rows_is_seen(site: str, dtype: str) -> None:
    assert moved_row_counts(plans_of(dtype, faulty=True), site) != []


# -- attention at a live batch of 1 to 64 ------------------------------------------------------

LENGTHS = (300, 5, 64, 257, 30, 130)
"""Keys of the sequences of a batch, in turn; the first is the one that is looked at."""


class Sequences:
    """Random keys and values of many sequences in one paged cache."""

    def __init__(self, plan: Plan, count: int) -> None:
        self.run = plan.run
        facts = {name: int_fact(plan.site, name) for name in ("q_heads", "kv_heads", "head_dim")}
        self.lengths = [LENGTHS[place % len(LENGTHS)] for place in range(count)]
        blocks = -(-max(LENGTHS) // BLOCK)
        self.tables = np.arange(count * blocks, dtype=np.int32).reshape(count, blocks)
        generator = torch.Generator().manual_seed(5)
        shape = (count * blocks, facts["kv_heads"], BLOCK, facts["head_dim"])
        dtype, kv_dtype = operand_dtype(plan.site, "x"), operand_dtype(plan.site, "kv")
        self.caches = [torch.randn(shape, generator=generator).to(kv_dtype) for _ in range(2)]
        width = (max(LENGTHS), facts["q_heads"], facts["head_dim"])
        self.first_queries = torch.randn(width, generator=generator).to(dtype)

    def rows(self, queries: tuple[int, ...]) -> torch.Tensor:
        """The output of the first sequence's last queries, so many of each sequence."""
        count = len(queries)
        total = sum(queries)
        q = torch.ones(total, *self.first_queries.shape[1:], dtype=self.first_queries.dtype)
        end = self.lengths[0]
        q[: queries[0]] = self.first_queries[end - queries[0] : end]
        metadata = AttentionMetadata(
            query_start_loc=np.concatenate([[0], np.cumsum(queries)]).astype(np.int32),
            seq_lens=np.array(self.lengths[:count], dtype=np.int32),
            block_tables=self.tables[:count],
        )
        result: torch.Tensor = self.run(q, *self.caches, self.run.prepare(metadata))
        return result[: queries[0]]


def moved_batches(plan: Plan) -> list[int]:
    """Live batches in which the first sequence's decode has other bits than alone."""
    sequences = Sequences(plan, MOST_ROWS)
    alone = sequences.rows((1,))
    counts = range(1, MOST_ROWS + 1)
    return [count for count in counts if not torch.equal(sequences.rows((1,) * count), alone)]


def moved_chunks(plan: Plan) -> list[int]:
    """Chunk lengths whose last row has other bits than the decode of that token."""
    sequences = Sequences(plan, 3)
    alone = sequences.rows((1,))
    chunks = (2, 3, 8, 16, 17, 64, 300)
    return [
        length for length in chunks if not torch.equal(sequences.rows((length, 1, 5))[-1:], alone)
    ]


@pytest.fixture
def splits_by_live_batch(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Splits of 128 keys where more than 8 sequences are live; how many were, call by call."""
    met: list[int] = []
    sound = attention.build_work

    def build_work(batch: Any, *rest: Any) -> Any:
        met.append(len(batch.seq_lens))
        with monkeypatch.context() as patch:
            if len(batch.seq_lens) > 8:
                patch.setattr(units, "TILES_PER_SPLIT", units.TILES_PER_SPLIT // 2)
            return sound(batch, *rest)

    monkeypatch.setattr(attention, "build_work", build_work)
    return met


@pytest.fixture
def path_by_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A way of its own for units of more than one token, whose sums end in other bits."""
    met: list[int] = []
    sound = TorchAttention._part_states

    def part_states(self: TorchAttention, part: Any, *rest: torch.Tensor) -> Any:
        states = sound(self, part, *rest)
        rows = int((part.query_rows > 0).sum(dim=1).max())
        if rows <= self.geometry.group:
            return states
        met.append(rows)
        total = torch.nextafter(states.total, torch.full_like(states.total, torch.inf))
        return type(states)(states.maximum, total, states.accumulator)

    monkeypatch.setattr(TorchAttention, "_part_states", part_states)
    return met


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 9])
def test_attention_is_independent_of_the_live_batch(window: int | None, dtype: str) -> None:
    """pegainfer-project/pegainfer#414: one sequence of 300 keys among 1 to 64."""
    assert moved_batches(plans_of(dtype).attention[window]) == []


def test_a_split_count_that_follows_the_live_batch_is_seen(splits_by_live_batch: list[int]) -> None:
    assert moved_batches(plans_of("float32").attention[None]) == [*range(9, MOST_ROWS + 1)]
    assert max(splits_by_live_batch) == MOST_ROWS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 9])
def test_a_token_has_the_same_attention_in_a_chunk_and_as_a_decode(
    window: int | None, dtype: str
) -> None:
    assert moved_chunks(plans_of(dtype).attention[window]) == []


def test_an_attention_path_that_follows_the_rows_is_seen(path_by_rows: list[int]) -> None:
    assert moved_chunks(plans_of("float32").attention[None]) != []
    assert path_by_rows


# -- decode beside prefill, through the whole engine -------------------------------------------


PROMPTS = (2, 9, 16, 17, 30, 65, 66, 130)


def last_logprobs(
    folder: Path, lengths: tuple[int, ...], dtype: str
) -> tuple[list[int], list[int]]:
    """For prompts of so many tokens, the bits of the next token's logprob: by prefill, by decode.

    The prompt's last token is computed among all of it, or alone over keys that are there.
    """
    ids = tuple(np.random.default_rng(6).integers(1, VOCAB, max(lengths)).tolist())
    prefilled, decoded = [], []
    with engine_over(tiny_model("qwen3"), folder, dtype=dtype, block_size=1) as engine:
        for length in lengths:
            params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
            request = Request(id=length, prompt_token_ids=ids[:length], params=params)
            engine.reset_prefix_cache()
            (cold,) = engine.generate([request])
            (warm,) = engine.generate([request])
            assert (cold.cached_tokens, warm.cached_tokens) == (0, length - 1)
            prefilled.append(int(cold.logprobs.view(np.int32)[0]))
            decoded.append(int(warm.logprobs.view(np.int32)[0]))
    return prefilled, decoded


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_of_a_token_more_equals_its_decode_over_cached_ones(
    tmp_path: Path, dtype: str
) -> None:
    """pegainfer-project/pegainfer#414: prefill of k + 1 tokens, and k cached with 1 decode."""
    prefilled, decoded = last_logprobs(tmp_path, PROMPTS, dtype)
    assert prefilled == decoded


def test_a_decode_that_differs_from_prefill_is_seen(
    tmp_path: Path, path_by_rows: list[int]
) -> None:
    prefilled, decoded = last_logprobs(tmp_path, PROMPTS, "float32")
    assert prefilled != decoded
    assert path_by_rows
