"""A leg decides all of a run, and its counters tell what the run exercised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagedctl.engine.engine import Engine
from pagedctl.errors import PagedctlError
from pagedctl.verify.case_legs import packed_leg, plain
from pagedctl.verify.comparison import first_difference
from pagedctl.verify.legs import Leg, LegTrace, Probe, series_of
from pagedctl.verify.reference import Reference, alone_leg
from tests.verify.invariance_harness import subject


def only(engines: Any, leg: Leg, **more: Any) -> LegTrace:
    ((_, trace),) = engines.traces([leg], **more)
    found: LegTrace = trace
    return found


def test_alone_is_one_row_and_one_step_a_token(tmp_path: Path) -> None:
    with subject(tmp_path, requests=3) as (made, engines):
        trace = only(engines, alone_leg(made.requests[0]))
        made.reference.prepare(made.requests)
    assert trace.rows == {1: 8}
    assert made.reference.rows == {1: 24}
    assert (trace.chunk_splits, trace.preemptions, trace.prefix_hit_tokens) == (0, 0, 0)


def test_the_reference_runs_each_request_once(tmp_path: Path) -> None:
    told: list[str] = []
    with subject(tmp_path, requests=3) as (made, _):
        made.reference.prepare(made.requests[:2], on_step=told.append)
        made.reference.prepare(made.requests, on_step=told.append)
        made.reference.prepare(made.requests, on_step=told.append)
    assert len(told) == 3 * 8


def test_a_leg_runs_to_the_same_steps_again(tmp_path: Path) -> None:
    with subject(tmp_path) as (made, engines):
        leg = packed_leg(made, "9 rows", 9, chunk_size=5)
        one, other = only(engines, leg), only(engines, leg)
        renamed = only(engines, replace(leg, name="another order"))
    assert one.rows == other.rows
    assert one.chunk_splits == other.chunk_splits > 0
    assert renamed.rows != one.rows
    assert one.most_rows == 9


def test_order_and_arrivals_follow_from_the_name(tmp_path: Path) -> None:
    with subject(tmp_path) as (made, _):
        leg = Leg(name="a", probes=plain(made.requests), arrivals=5)
    steps = [step for step, _ in leg.schedule()]
    assert steps == sorted(steps)
    assert set(steps) <= set(range(6))
    assert leg.schedule() == replace(leg, name="b", order="a").schedule()
    assert leg.schedule() != replace(leg, name="b").schedule()
    fillers = tuple(made.maker.fillers("f", 4))
    early = replace(leg, fillers=fillers, fillers_first=True).schedule()
    assert {step for step, one in early if one in fillers} == {0}


@pytest.mark.parametrize(
    ("options", "counter"),
    [
        ({"chunk_size": 3}, "chunk_splits"),
        ({"debug_force_preemption_interval": 1}, "preemptions"),
    ],
)
def test_a_counter_counts_what_was_exercised_and_nothing_else(
    tmp_path: Path, options: dict[str, Any], counter: str
) -> None:
    with subject(tmp_path) as (made, engines):
        leg = Leg(name="leg", probes=plain(made.requests), options={"prefix_cache": False})
        without = only(engines, leg)
        with_it = only(engines, replace(leg, options={**leg.options, **options}))
    assert without.counter(counter) == 0
    assert with_it.counter(counter) > 0
    assert without.rows[6] > 0


def test_a_stop_at_lag_1_overshoots_by_one_row(tmp_path: Path) -> None:
    with subject(tmp_path, requests=2) as (made, engines):
        (answer,) = made.reference.answers(made.requests[1])
        ids = answer.token_ids.tolist()
        params = replace(made.requests[1].params, stop_token_ids=(ids[3],))
        stopped = replace(made.requests[1], params=params)
        probe = Probe(request=stopped, of=made.requests[1], end=ids.index(ids[3]) + 1)
        leg = Leg(name="stop", probes=(probe,))
        found = {lag: only(engines, replace(leg, options={"lag": lag})) for lag in (0, 1)}
        expected = made.reference.expected(probe, 0)
    assert (found[0].overshoots, found[1].overshoots) == (0, 1)
    for trace in found.values():
        assert first_difference(expected, trace.answers[stopped.id, 0]) is None


def test_a_leg_that_continues_finds_what_the_one_before_left(tmp_path: Path) -> None:
    with subject(tmp_path, requests=4) as (made, engines):
        first = Leg(name="first", probes=plain(made.requests))
        warm = replace(first, name="warm", continues=True)
        cold = replace(first, name="cold")
        traces = {leg.name: trace for leg, trace in engines.traces([first, warm, cold])}
    assert traces["warm"].prefix_hit_tokens > traces["first"].prefix_hit_tokens
    assert traces["cold"].prefix_hit_tokens == traces["first"].prefix_hit_tokens
    legs = [first, warm, cold]
    assert [leg.name for leg in series_of(legs, "warm")] == ["first", "warm"]
    assert [leg.name for leg in series_of(legs, "cold")] == ["cold"]
    with pytest.raises(KeyError):
        series_of(legs, "lukewarm")


def test_scores_are_the_generated_logprobs(tmp_path: Path) -> None:
    with subject(tmp_path, requests=3) as (made, engines):
        probes = []
        for request in made.requests:
            (answer,) = made.reference.answers(request)
            ids = request.prompt_token_ids + tuple(answer.token_ids.tolist())
            probes.append(Probe(request=replace(request, prompt_token_ids=ids), of=request))
        trace = only(engines, Leg(name="score", probes=tuple(probes), scores=True))
        expected = {probe.of.id: made.reference.expected(probe, 0) for probe in probes}
    assert len(trace.answers) == 3
    for (request_id, _), answer in trace.answers.items():
        assert first_difference(expected[request_id], answer) is None


def test_a_watch_sees_the_engine_of_its_leg_alone(tmp_path: Path) -> None:
    watched: list[Engine] = []

    @contextmanager
    def watch(engine: Engine) -> Iterator[None]:
        watched.append(engine)
        yield

    with subject(tmp_path, requests=2) as (made, engines):
        legs = [Leg(name=name, probes=plain(made.requests)) for name in ("a", "b")]
        assert len(list(engines.traces(legs, watches={"b": watch}))) == 2
    assert len(watched) == 1
    assert watched[0] is not engines.first


def test_a_request_that_fails_alone_ends_the_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subject(tmp_path, requests=2) as (made, engines):
        made.reference.prepare(made.requests[:1])
        (sound,) = made.reference.answers(made.requests[0])
        broken = replace(sound, failure="non_finite")
        real = only(engines, alone_leg(made.requests[1]))
        key = (made.requests[1].id, 0)
        monkeypatch.setattr(
            "pagedctl.verify.reference.run_leg",
            lambda *given, **named: replace(real, answers={key: broken}),
        )
        with pytest.raises(PagedctlError, match="request 1 failed by itself: non_finite"):
            Reference(engines).prepare(made.requests[1:])
