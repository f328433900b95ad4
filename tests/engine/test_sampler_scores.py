"""Scores of given tokens, likeliest tokens and faults, step by step on a runner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedctl.engine import batch_rows, sampler
from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Request
from pagedctl.engine.sampler import Sampler
from pagedctl.engine.sequence import Sequence
from pagedctl.engine.step_plan import ScheduledRow, StepPlan
from tests.engine.harness import tiny_engine
from tests.engine.sampler_harness import Result, Steps, asked
from tests.engine.test_sampler_edits import replaced
from tests.kernels import reference
from tests.kernels.conftest import poisoned_memory  # noqa: F401
from tests.kernels.harness import assert_same_bits
from tests.reference.tiny_models import FAMILIES, VOCAB, TinyModel, tiny_model

MODEL = tiny_model("qwen3")


def engine_of(
    folder: Path,
    basis: str = "scaled",
    *,
    dtype: torch.dtype = torch.float64,
    model: TinyModel = MODEL,
    **options: Any,
) -> Engine:
    return tiny_engine(model, folder, dtype=dtype, logprob_basis=basis, block_size=4, **options)


def requests(count: int = 6, **params: Any) -> list[Request]:
    rng = np.random.default_rng(5)
    return [
        asked(
            number,
            tuple(rng.integers(1, VOCAB, 2 + 7 * number).tolist()),
            temperature=[0.0, 1.0, 0.7, 1.6][number % 4],
            **{"max_tokens": 3, **params},
        )
        for number in range(count)
    ]


def check_scores(result: Result, model: TinyModel, basis: str, tolerance: float = 1e-4) -> None:
    """Every prompt token but the first, by log-softmax in float64."""
    prompt = list(result.request.prompt_token_ids)
    assert len(result.scores) == len(prompt) - 1
    divisor = 1.0 if basis == "raw" else result.request.params.temperature or 1.0
    for place, row in enumerate(model.reference().logits(prompt)[:-1]):
        want = reference.log_softmax(row / divisor)[prompt[place + 1]]
        assert abs(result.scores[place] - want) < tolerance


def check_all(folder: Path, basis: str, model: TinyModel = MODEL, **how: Any) -> None:
    with engine_of(folder, basis, model=model) as engine:
        for result in Steps(engine=engine, score=True, **how).run(requests()):
            check_scores(result, model, basis)
            assert len(result.token_ids) == 3


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("basis", ["scaled", "raw"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_a_float64_transformer(
    tmp_path: Path, family: str, basis: str, chunk: int
) -> None:
    check_all(tmp_path, basis, tiny_model(family), chunk=chunk, lag=chunk % 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_slices_chunks_and_neighbours_change_no_bit_of_a_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """The count of positions whose logits are held at once is a matter of memory alone."""
    some = requests(7)
    seen = []
    with engine_of(tmp_path, dtype=dtype) as engine:
        for at_once in (1, 7, 64, 10**6):
            monkeypatch.setattr(sampler, "SCORED_AT_ONCE", at_once)
            for chunk in (3, 64):
                packed = Steps(engine=engine, score=True, chunk=chunk).run(some)
                alone = [
                    Steps(engine=engine, score=True, chunk=chunk).run([one])[0] for one in some
                ]
                seen += [[one.bits() for one in results] for results in (packed, alone)]
    assert len(seen[0]) == 7
    assert all(one == seen[0] for one in seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_score_is_the_logprob_that_the_token_had_when_it_was_drawn(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    with engine_of(tmp_path, dtype=dtype) as engine:
        drawn = Steps(engine=engine).run(requests(6, max_tokens=9, top_p=0.9, top_k=20))
        again = [
            asked(n, (*one.request.prompt_token_ids, *one.token_ids), max_tokens=1,
                  temperature=one.request.params.temperature)
            for n, one in enumerate(drawn)
        ]  # fmt: skip
        scored = Steps(engine=engine, score=True, chunk=7).run(again)
    for before, after in zip(drawn, scored, strict=True):
        assert after.scores[-9:] == before.logprobs


def test_a_score_samples_nothing_where_nothing_is_to_be_sampled(tmp_path: Path) -> None:
    """A plan row with scored offsets alone: no token, no count, but its scores."""
    with engine_of(tmp_path) as engine:
        sequence, row = scored_row(asked(0, (5, 6, 7, 8)))
        plan = StepPlan(step=1, rows=(row,))
        launched = engine.parts.runner.launch(plan, {(0, 0): sequence})
        assert launched.sampled is None
        committed = launched.wait()
    assert (committed.token_ids, committed.logprobs, committed.top) == ([], [], [])
    assert [len(one) for one in committed.scores] == [3]
    assert committed.row_faulty == [False]


def scored_row(request: Request) -> tuple[Sequence, ScheduledRow]:
    """A sequence that is only scored, and its one row."""
    prompt = list(request.prompt_token_ids)
    sequence = Sequence(
        request=request,
        sample=0,
        seed=request.params.seed or 0,
        max_len=len(prompt),
        stop_token_ids=frozenset(),
        tokens=prompt,
        num_prompt_tokens=len(prompt),
    )
    row = ScheduledRow(
        request_id=request.id,
        sample=0,
        row=0,
        start=0,
        num_tokens=len(prompt),
        sample_offsets=(),
        new_blocks=tuple(range(9)),
        admitted=True,
        scored_offsets=(0, len(prompt) - 1),
    )
    return sequence, row


def test_a_token_without_a_logit_scores_minus_infinity(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        hidden = torch.ones(2, 48, dtype=torch.float64)
        ones = torch.ones(2, dtype=torch.float64)
        scores = engine.parts.runner.sampler.score(hidden, ones, torch.tensor([5, VOCAB + 3]))
    assert torch.isfinite(scores).tolist() == [True, False]
    assert scores[1] == -torch.inf


def test_given_tokens_are_not_scored_after_truncation(tmp_path: Path) -> None:
    with (
        engine_of(tmp_path, "processed") as engine,
        pytest.raises(RuntimeError, match="no logprob after truncation"),
    ):
        Steps(engine=engine, score=True).run(requests(3))


def test_only_rows_that_ask_have_likeliest_tokens(tmp_path: Path) -> None:
    some = [asked(n, (n + 1, 5), top_logprobs=[0, 3, 0, 40][n]) for n in range(4)]
    with engine_of(tmp_path) as engine:
        results = Steps(engine=engine).run(some)
        plain = Steps(engine=engine).run([asked(n, (n + 1, 5)) for n in range(4)])
    for result, without in zip(results, plain, strict=True):
        count = result.request.params.top_logprobs
        sizes = {None if one is None else (len(one[0]), len(one[1])) for one in result.top}
        assert sizes == {(count, count) if count else None}
        assert (result.token_ids, result.logprobs) == (without.token_ids, without.logprobs)


# -- faults ----------------------------------------------------------------------------------


def broken_engine(folder: Path, **changed: Callable[[torch.Tensor], None]) -> Engine:
    """A float32 engine with one of its tensors changed in place."""
    tensors = {name: one.clone() for name, one in MODEL.tensors(torch.float32).items()}
    for name, change in changed.items():
        change(tensors[name.replace("__", ".") + ".weight"])
    with engine_of(folder, dtype=torch.float32) as probe:
        config = probe.config
    return Engine(config, weights=tensors)


def poison_embedding(weight: torch.Tensor) -> None:
    weight[77] = torch.nan


def overflow_a_logit(weight: torch.Tensor) -> None:
    weight[11] = 3e38


@pytest.mark.parametrize("score", [False, True])
def test_a_row_that_sampled_nothing_yet_reports_its_fault(tmp_path: Path, score: bool) -> None:
    """huggingface/trl#6166: the faulty row is named in the step that found it."""
    bad = asked(0, (5, 77, *range(3, 15)), max_tokens=2)
    good = [asked(n, tuple(range(n, n + 9)), max_tokens=2) for n in (1, 2)]
    with broken_engine(tmp_path, model__embed_tokens=poison_embedding) as engine:
        sequence, row = scored_row(bad)
        row = ScheduledRow(**{**vars(row), "scored_offsets": (0, 13 * score)})
        plan = StepPlan(step=1, rows=(row,))
        first = engine.parts.runner.launch(plan, {(0, 0): sequence}).wait()
        assert (first.row_faulty, first.token_ids) == ([True], [])
        results = Steps(engine=engine, score=score, chunk=4).run([bad, *good])
    with engine_of(tmp_path / "clean", dtype=torch.float32) as engine:
        clean = Steps(engine=engine, score=score, chunk=4).run([bad, *good])
    assert [one.faulty for one in results] == [True, False, False]
    assert [one.bits() for one in results[1:]] == [one.bits() for one in clean[1:]]


def test_a_scored_row_whose_logits_overflow_is_faulty(tmp_path: Path) -> None:
    """The hidden states are finite, so the scores alone can tell."""
    with broken_engine(tmp_path, lm_head=overflow_a_logit) as engine:
        sequence, row = scored_row(asked(0, tuple(range(20, 50))))
        plan = StepPlan(step=1, rows=(row,))
        committed = engine.parts.runner.launch(plan, {(0, 0): sequence}).wait()
        assert np.isnan(committed.scores[0]).any()
        assert committed.row_faulty == [True]
        none = ScheduledRow(**{**vars(row), "scored_offsets": (0, 0)})
        plan = StepPlan(step=2, rows=(none,))
        unscored = engine.parts.runner.launch(plan, {(0, 0): sequence}).wait()
        assert unscored.row_faulty == [False]


# -- blocks that were found ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_starts_behind_found_blocks_writes_none_of_them(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """The second request's first 8 tokens lie in the first one's blocks."""
    prompt = tuple(range(10, 31))
    with engine_of(tmp_path, dtype=dtype) as engine:
        (whole,) = Steps(engine=engine).run([asked(1, prompt, max_tokens=1)])
        caches = [one.clone() for pair in engine.parts.runner.caches for one in pair]
        sequence, row = scored_row(asked(2, prompt, seed=1))
        row = ScheduledRow(
            **{
                **vars(row),
                "start": 8,
                "num_tokens": len(prompt) - 8,
                "sample_offsets": (len(prompt) - 9,),
                "scored_offsets": (0, 0),
                "new_blocks": (0, 1, 20, 21, 22, 23),
            }
        )
        sequence.append_in_flight()
        plan = StepPlan(step=1, rows=(row,))
        committed = engine.parts.runner.launch(plan, {(2, 0): sequence}).wait()
        after = [one for pair in engine.parts.runner.caches for one in pair]
    assert (committed.token_ids, committed.logprobs) == (whole.token_ids, whole.logprobs)
    for before, now in zip(caches, after, strict=True):
        assert_same_bits(before[:20], now[:20])
        assert not torch.equal(before[20:24], now[20:24])


# -- mutants ---------------------------------------------------------------------------------


def the_token_itself(original: Any) -> Any:
    """Score the token of the position instead of the one after it."""

    def positions(first: int, row: ScheduledRow, sequences: Any) -> Any:
        found = original(first, row, sequences)
        begin, end = row.scored_offsets
        tokens = sequences[row.request_id, row.sample].tokens
        found[2] = tokens[row.start + begin : row.start + end]
        return found

    return positions


def one_position_early(original: Any) -> Any:
    def positions(first: int, row: ScheduledRow, sequences: Any) -> Any:
        found = original(first, row, sequences)
        found[0] = np.maximum(found[0] - 1, 0)
        return found

    return positions


def unscaled(original: Any) -> Any:
    return lambda self, hidden, temperature, token_ids: original(
        self, hidden, torch.ones_like(temperature), token_ids
    )


@pytest.mark.parametrize(
    ("where", "name", "change"),
    [
        (batch_rows, "_scored_positions", the_token_itself),
        (batch_rows, "_scored_positions", one_position_early),
        (Sampler, "score", unscaled),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)).rpartition(".")[2],
)
def test_a_wrong_score_is_reached_and_caught(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: Any,
    name: str,
    change: Callable[[Any], Any],
) -> None:
    check_all(tmp_path / "control", "scaled", chunk=5)
    site = replaced(monkeypatch, where, name, change)
    with pytest.raises(AssertionError):
        check_all(tmp_path / "mutant", "scaled", chunk=5)
    assert site.reached > 0
