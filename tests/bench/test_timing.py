"""Latencies from recorded steps, against figures worked out by hand and against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedctl.bench.timing import (
    StepEvent,
    distribution,
    load_of,
    sample_latencies,
    token_times,
)
from pagedctl.engine.step_report import StepReport


def event(
    end_s: float, *committed: tuple[object, int, int], running: int = 1, used_blocks: int = 1
) -> StepEvent:
    report = StepReport(
        step=1,
        num_rows=len(committed),
        num_tokens=len(committed),
        num_sampled=len(committed),
        committed=committed,  # type: ignore[arg-type]
        running=running,
        waiting=0,
        used_blocks=used_blocks,
    )
    return StepEvent(end_s=end_s, report=report)


# Requests a (3 tokens), b (1 token) and c (2 tokens in one step) arrive at 10 s.
RECORDED = [
    event(10.5, running=3, used_blocks=4),
    event(11.0, ("a", 0, 1), ("b", 0, 1), running=2, used_blocks=9),
    event(11.25, ("a", 0, 1), running=2, used_blocks=5),
    event(12.0, ("a", 0, 1), ("c", 1, 2), running=0, used_blocks=0),
]
KEYS = [("a", 0), ("b", 0), ("c", 1)]


def test_the_time_of_a_token_is_the_end_of_its_step() -> None:
    assert token_times(RECORDED) == {
        ("a", 0): [11.0, 11.25, 12.0],
        ("b", 0): [11.0],
        ("c", 1): [12.0, 12.0],
    }


def test_latencies_of_recorded_steps() -> None:
    found = sample_latencies(RECORDED, arrival_s=10.0, finished=KEYS)
    a, b, c = (found[key] for key in KEYS)  # type: ignore[index]
    assert (a.ttft_ms, a.e2e_ms, a.tpot_ms, a.itl_ms) == (1000, 2000, 500, (250, 750))
    assert (b.ttft_ms, b.e2e_ms, b.tpot_ms, b.itl_ms) == (1000, 1000, None, ())
    assert (c.ttft_ms, c.e2e_ms, c.tpot_ms, c.itl_ms) == (2000, 2000, 0, (0,))


def test_only_finished_samples_with_a_token_count() -> None:
    finished = [("a", 0), ("never sampled", 0)]
    assert set(sample_latencies(RECORDED, arrival_s=10.0, finished=finished)) == {("a", 0)}


def test_the_load_of_recorded_steps() -> None:
    load = load_of(RECORDED)
    assert (load.running_p50, load.running_max, load.used_blocks_max) == (2.0, 3, 9)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_a_distribution_is_numpys(values: list[float]) -> None:
    found = distribution(values)
    assert found is not None
    assert found.mean == pytest.approx(np.mean(values))
    assert found.std == pytest.approx(np.std(values))
    assert found.median == found.p50 == pytest.approx(np.median(values))
    expected = tuple(np.percentile(values, [50, 90, 95, 99]))
    assert (found.p50, found.p90, found.p95, found.p99) == expected


def test_percentiles_interpolate_linearly() -> None:
    found = distribution([4.0, 1.0, 2.0, 3.0])
    assert found is not None
    assert found.as_dict() == pytest.approx(
        {
            "mean": 2.5,
            "median": 2.5,
            "std": 1.25**0.5,
            "p50": 2.5,
            "p90": 3.7,
            "p95": 3.85,
            "p99": 3.97,
        }
    )


def test_nothing_has_no_distribution() -> None:
    assert distribution([]) is None


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 10), min_size=2, max_size=50))
def test_the_parts_of_a_sample_add_up(gaps_s: list[float]) -> None:
    ends_s = np.cumsum(gaps_s).tolist()
    events = [event(end_s, ("a", 0, 1)) for end_s in ends_s]
    (latency,) = sample_latencies(events, arrival_s=0.0, finished=[("a", 0)]).values()
    assert latency.ttft_ms == pytest.approx(1e3 * gaps_s[0])
    assert latency.ttft_ms + sum(latency.itl_ms) == pytest.approx(latency.e2e_ms)
    assert latency.tpot_ms == pytest.approx(np.mean(latency.itl_ms))
