"""Cancelling, pausing and closing: who is answered how, and that nobody else notices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Completion, Request, RequestId, SamplingParams, ScoreRequest
from pagedctl.errors import ConfigError, RequestError
from tests.engine.harness import (
    Key,
    assert_all_free,
    assert_prefix_bits,
    assert_same_bits,
    drain,
    tiny_engine,
)
from tests.reference.tiny_models import tiny_model

PROMPT = tuple(range(3, 20))
OPTIONS: dict[str, Any] = {"dtype": torch.float32, "block_size": 4, "chunk_size": 5}
lags = pytest.mark.parametrize("lag", [0, 1])


def asked(name: RequestId, prompt: tuple[int, ...] = PROMPT, **params: Any) -> Request:
    chosen = {"seed": 7, "max_tokens": 8, "ignore_eos": True, **params}
    return Request(id=name, prompt_token_ids=prompt, params=SamplingParams(**chosen))


def build(folder: Path, **options: Any) -> Engine:
    return tiny_engine(tiny_model("qwen3"), folder, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Request], list[Completion]]:
    """What a request is answered with if nobody interferes, by itself."""
    with build(tmp_path_factory.mktemp("whole")) as engine:
        yield lambda request: engine.generate([request])


def first(engine: Engine, found: dict[Key, Completion], count: int) -> None:
    """*count* steps; what finished is put into *found*."""
    for _ in range(count):
        found |= {(done.id, done.sample): done for done in engine.step()}
        engine.parts.scheduler.audit()


def state_of(engine: Engine, name: str) -> str:
    """Where in its life the first sample of *name* is; "done" if it was answered."""
    for sequence in engine.parts.scheduler.sequences():
        if sequence.request.id == name:
            if sequence.row is None:
                return "preempted" if sequence.num_preemptions else "waiting"
            if sequence.num_in_flight:
                return "in flight"
            return "decoding" if sequence.num_output_tokens else "prefill"
    return "done"


@lags
def test_a_request_can_be_cancelled_at_any_moment(
    tmp_path: Path, lag: int, whole: Callable[[Request], list[Completion]]
) -> None:
    """vllm-project/vime#70, mlx-node/mlx-node#36: as many logprobs as tokens, whenever it ends."""
    victim, mate = asked("victim"), asked("mate", tuple(range(30, 39)), seed=8)
    shared = asked("shared", PROMPT[:13], seed=9)  # waits for the victim's blocks
    expected = {one.id: whole(one)[0] for one in (victim, mate, shared)}
    seen: Counter[str] = Counter()
    followers = 0
    with build(tmp_path, lag=lag, max_num_seqs=3) as engine:
        for moment in range(16):
            engine.reset_prefix_cache()
            for one in (mate, victim, shared):
                engine.submit(one)
            found: dict[Key, Completion] = {}
            first(engine, found, moment)
            state = state_of(engine, "victim")
            seen[state] += 1
            followers += state_of(engine, "shared") == "waiting" and state != "waiting"
            assert engine.cancel("victim") == (state != "done")
            assert engine.cancel("victim") == 0
            engine.parts.scheduler.audit()
            if state != "done":
                first(engine, found, 1)
                partial = found.pop(("victim", 0))
                assert (partial.finish_reason, partial.stop_reason) == ("abort", None)
                assert_prefix_bits(partial, expected["victim"])
                assert len(partial.token_ids) < 8
                engine.submit(victim)  # the id is free at once
            rest = found | drain(engine)
            for name, other in expected.items():
                assert_same_bits(rest[name, 0], other)
    assert {"waiting", "prefill", "done"} < set(seen)
    assert seen["in flight" if lag else "decoding"] > 3
    assert followers > 0  # it was cancelled while another waited for its blocks


@lags
def test_a_preempted_request_can_be_cancelled(
    tmp_path: Path, lag: int, whole: Callable[[Request], list[Completion]]
) -> None:
    """vllm-project/vllm-gaudi#524: what was generated before the preemption is kept."""
    requests = [asked(n, PROMPT[n : n + 8], max_tokens=20) for n in range(3)]
    expected = {one.id: whole(one)[0] for one in requests}
    with build(tmp_path, lag=lag, pool_blocks=15, prefix_cache=False) as engine:
        for one in requests:
            engine.submit(one)
        found: dict[Key, Completion] = {}
        while not any(one.num_preemptions for one in engine.parts.scheduler.waiting):
            first(engine, found, 1)
        (victim,) = (one.request.id for one in engine.parts.scheduler.waiting)
        assert engine.cancel(victim) == 1
        found |= drain(engine)
    partial = found.pop((victim, 0))
    assert partial.finish_reason == "abort"
    assert (partial.preemptions, len(partial.token_ids) > 0) == (1, True)
    assert_prefix_bits(partial, expected[victim])
    assert len(found) == 2
    for (name, _), done in found.items():
        assert_same_bits(done, expected[name])


@lags
def test_samples_that_are_done_are_answered_once_and_the_others_end(
    tmp_path: Path, lag: int, whole: Callable[[Request], list[Completion]]
) -> None:
    free = whole(asked("free", n=3))
    stop = int(free[1].token_ids[0])
    request = asked("x", n=3, stop_token_ids=(stop,))
    expected = whole(request)
    assert [len(one.token_ids) > 3 for one in expected] == [True, False, True]
    with build(tmp_path, lag=lag) as engine:
        engine.submit(request)
        found: dict[Key, Completion] = {}
        while not found:
            first(engine, found, 1)
        assert list(found) == [("x", 1)]
        assert engine.cancel("x") == 1
        rest = drain(engine)
    assert_same_bits(found["x", 1], expected[1])
    assert sorted(rest) == [("x", 0), ("x", 2)]
    for (_, sample), done in rest.items():
        assert done.finish_reason == "abort"
        assert_prefix_bits(done, expected[sample])


@lags
def test_cancel_counts_requests_and_knows_an_id_by_its_text(tmp_path: Path, lag: int) -> None:
    with build(tmp_path, lag=lag) as engine:
        assert (engine.cancel("nobody"), engine.cancel()) == (0, 0)
        engine.submit(asked(5, n=2))
        engine.submit(asked("6"))
        engine.submit(asked("7"))
        engine.step()
        assert engine.cancel("5") == 1
        assert engine.cancel(5) == 0
        assert engine.cancel() == 2
        assert engine.cancel() == 0
        found = drain(engine)
        assert list(found) == [(5, 0), (5, 1), ("6", 0), ("7", 0)]
        assert {one.finish_reason for one in found.values()} == {"abort"}
        assert engine.cancel(5) == 0


@lags
def test_a_cancelled_request_keeps_what_was_known_of_its_prompt(tmp_path: Path, lag: int) -> None:
    """Half of a prompt's logprobs are none: shapes are those that were asked for."""
    request = asked("x", prompt_logprobs=True, top_logprobs=3)
    with build(tmp_path, lag=lag) as engine:
        engine.submit(request)
        engine.step()
        engine.cancel()
        early = drain(engine)["x", 0]
        engine.submit(request)
        for _ in range(6):
            engine.step()
        engine.cancel()
        later = drain(engine)["x", 0]
    assert early.prompt_logprobs is None
    assert early.top_logprobs is not None
    assert early.top_logprobs.token_ids.shape == early.top_logprobs.logprobs.shape == (0, 3)
    assert later.prompt_logprobs is not None
    assert later.top_logprobs is not None
    assert len(later.prompt_logprobs) == len(PROMPT) - 1
    assert later.top_logprobs.token_ids.shape == (len(later.token_ids), 3)
    assert len(later.token_ids) > 0


# -- pause ---------------------------------------------------------------------------------------


@lags
def test_keep_freezes_and_resume_goes_on_with_the_same_bits_and_blocks(
    tmp_path: Path, lag: int, whole: Callable[[Request], list[Completion]]
) -> None:
    requests = [asked("a"), asked("b", PROMPT[5:], seed=3)]
    expected = {one.id: whole(one)[0] for one in requests}
    computed = set()
    for moment in range(8):
        with build(tmp_path / str(moment), lag=lag) as engine:
            for one in requests:
                engine.submit(one)
            found: dict[Key, Completion] = {}
            first(engine, found, moment)
            engine.pause("keep")
            before = engine.stats()
            assert all(one.num_in_flight == 0 for one in engine.parts.scheduler.sequences())
            found |= {(one.id, one.sample): one for one in engine.step()}
            for _ in range(3):
                assert engine.step() == []
            assert engine.stats() == before
            engine.pause("keep")  # twice is once
            engine.resume()
            found |= drain(engine)
            computed.add(engine.stats().forward_tokens)
        for name, other in expected.items():
            assert_same_bits(found[name, 0], other)
            assert found[name, 0].preemptions == 0
    assert len(computed) == 1  # nothing was computed again


@lags
def test_wait_finishes_what_came_before_and_holds_what_comes_after(
    tmp_path: Path, lag: int, whole: Callable[[Request], list[Completion]]
) -> None:
    early, late = asked("early"), asked("late", seed=3)
    with build(tmp_path, lag=lag, max_num_seqs=1) as engine:
        engine.submit(early)
        engine.submit(asked("second", seed=4))
        engine.step()
        engine.pause("wait")
        engine.submit(late)
        with pytest.raises(RequestError, match="in use"):
            engine.submit(late)
        found: dict[Key, Completion] = {}
        first(engine, found, 40)
        assert set(found) == {("early", 0), ("second", 0)}
        assert engine.step() == []
        assert engine.has_unfinished()
        assert (engine.stats().running, engine.stats().waiting) == (0, 1)
        engine.resume()
        found |= drain(engine)
    for one in (early, late):
        assert_same_bits(found[one.id, 0], whole(one)[0])


@lags
def test_abort_answers_all_and_holds_what_comes_after(
    tmp_path: Path, lag: int, whole: Callable[[Request], list[Completion]]
) -> None:
    request = asked("x")
    with build(tmp_path, lag=lag) as engine:
        engine.submit(request)
        engine.submit(asked("y", n=2))
        for _ in range(5):
            engine.step()
        engine.pause("abort")
        partials = engine.step()
        assert {(one.id, one.sample) for one in partials} == {("x", 0), ("y", 0), ("y", 1)}
        assert {one.finish_reason for one in partials} == {"abort"}
        assert engine.step() == []
        assert not engine.has_unfinished()
        assert_all_free(engine)
        engine.submit(request)
        assert engine.step() == []
        engine.resume()
        assert_same_bits(drain(engine)["x", 0], whole(request)[0])


@lags
def test_pauses_follow_each_other(
    tmp_path: Path, lag: int, whole: Callable[[Request], list[Completion]]
) -> None:
    """The last mode holds; what was submitted meanwhile stays held until resume."""
    before, held, dropped = asked("before"), asked("held", seed=3), asked("dropped", seed=5)
    with build(tmp_path, lag=lag) as engine:
        engine.submit(before)
        engine.step()
        engine.pause("keep")
        engine.submit(held)
        engine.submit(dropped)
        assert engine.cancel("dropped") == 1
        assert [one.id for one in engine.step()] == ["dropped"]
        engine.pause("wait")
        found: dict[Key, Completion] = {}
        first(engine, found, 20)
        assert list(found) == [("before", 0)]
        engine.pause("keep")
        engine.resume()
        engine.resume()  # twice is once
        found |= drain(engine)
        assert_same_bits(found["before", 0], whole(before)[0])
        assert_same_bits(found["held", 0], whole(held)[0])
        engine.pause("keep")
        engine.submit(held)
        engine.pause("abort")
        assert [(one.id, one.finish_reason) for one in engine.step()] == [("held", "abort")]
        engine.resume()
        assert not engine.has_unfinished()


def test_a_mode_that_is_none_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with build(tmp_path) as engine:
        for mode in ("stop", "", None, 1):
            with pytest.raises(ConfigError, match="is not a mode of a pause"):
                engine.pause(mode)  # type: ignore[arg-type]
        assert len(engine.generate([asked("x")])[0].token_ids) == 8


# -- what needs an idle engine, and what is dropped ----------------------------------------------


@lags
def test_generate_and_scores_need_an_idle_engine(tmp_path: Path, lag: int) -> None:
    def scores(engine: Engine) -> object:
        return next(engine.scores([ScoreRequest(id=0, token_ids=(1, 2))]))

    calls: list[Callable[[Engine], object]] = [
        lambda engine: engine.generate([asked("y")]),
        lambda engine: engine.score([[1, 2]]),
        scores,
    ]
    with build(tmp_path, lag=lag) as engine:
        engine.submit(asked("x"))
        for call in calls:
            with pytest.raises(RuntimeError, match="needs an idle engine"):
                call(engine)
        engine.step()
        engine.cancel()
        with pytest.raises(RuntimeError, match="needs an idle engine"):
            calls[0](engine)  # the partial answer was not fetched
        drain(engine)
        engine.pause("keep")
        for call in calls:
            with pytest.raises(RuntimeError, match="is not paused"):
                call(engine)
        engine.resume()
        for call in calls:
            call(engine)


@lags
@pytest.mark.parametrize("taken", [0, 1, 4])
def test_closing_the_iterator_of_scores_frees_everything_at_once(
    tmp_path: Path, lag: int, taken: int
) -> None:
    def endless() -> Iterator[ScoreRequest]:
        number = 0
        while True:
            yield ScoreRequest(id=number, token_ids=PROMPT)
            number += 1

    with build(tmp_path, lag=lag, max_num_seqs=4) as engine:
        scores = engine.scores(endless())
        for _ in range(taken):
            assert next(scores).error is None
        if taken:
            for call in (
                engine.step,
                engine.cancel,
                lambda: engine.pause("keep"),
                lambda: engine.submit(asked("x")),
                lambda: next(engine.scores([])),
            ):
                with pytest.raises(RuntimeError, match="the engine is scoring"):
                    call()
        scores.close()
        engine.parts.scheduler.audit()
        assert_all_free(engine)
        assert not engine.has_unfinished()
        assert len(engine.generate([asked("x")])[0].token_ids) == 8
        assert len(engine.score([PROMPT])[0].logprobs) == len(PROMPT) - 1


@lags
def test_a_broken_score_request_ends_the_iterator_and_frees_everything(
    tmp_path: Path, lag: int
) -> None:
    asked_scores = [ScoreRequest(id=n, token_ids=PROMPT) for n in range(9)]
    asked_scores[8] = ScoreRequest(id="bad", token_ids=(1, 99))
    with build(tmp_path, lag=lag, max_num_seqs=2) as engine:
        scores = engine.scores(asked_scores)
        with pytest.raises(RequestError) as caught:
            for _ in scores:
                pass
        assert caught.value.where == 'score "bad", field token_ids'
        assert_all_free(engine)
        assert not engine.has_unfinished()


def test_an_engine_closed_while_it_scores_says_so_and_does_not_hang(tmp_path: Path) -> None:
    with build(tmp_path, chunk_size=2) as engine:
        scores = engine.scores(ScoreRequest(id=n, token_ids=PROMPT[n:]) for n in range(3))
        next(scores)
        engine.close()
        with pytest.raises(RuntimeError, match="it is closed"):
            next(scores)
        assert_all_free(engine)


@pytest.mark.parametrize("samples", [(2,), (0, 3), (3, 1), None])
@lags
def test_some_samples_of_a_request_are_those_of_the_whole(
    tmp_path: Path,
    lag: int,
    samples: tuple[int, ...] | None,
    whole: Callable[[Request], list[Completion]],
) -> None:
    """vllm-project/vllm#10852: a sample's stream is its own, whichever others run."""
    request = asked("x", n=4)
    with build(tmp_path, lag=lag) as engine:
        engine.submit(request, samples=samples)
        found = drain(engine)
    assert {sample for _, sample in found} == set(samples or range(4))
    for (_, sample), done in found.items():
        assert_same_bits(done, whole(request)[sample])


@pytest.mark.parametrize("samples", [(), (4,), (-1,), (0, 0), (True,), (1.0,), ("0",), ([0],)])
def test_samples_that_a_request_has_not_are_refused(tmp_path: Path, samples: Any) -> None:
    with build(tmp_path) as engine:
        with pytest.raises(RequestError, match="are not some of the request's 4"):
            engine.submit(asked("x", n=4), samples=samples)
        assert not engine.has_unfinished()
