"""From the times at which steps ended to latencies, and what each figure means.

All requests arrive together, before the first step. A token's time is the end of the step
that committed it, so tokens that one step commits for a sample share their time. Per sample,
in milliseconds:

* TTFT, time to first token: from the arrival to its first token.
* E2E, end to end: from the arrival to its last token.
* TPOT, time per output token: ``(E2E - TTFT) / (tokens - 1)``; a sample of one token has none.
* ITL, inter-token latency: the times between its successive tokens; all samples' together.

These are vLLM's definitions for requests that arrive at once. A sample's latencies count only
if it finished. Percentiles interpolate linearly between the two nearest values, as numpy's
default does; ``std`` is that of the population.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from pagedctl.engine.request import RequestId
from pagedctl.engine.step_report import StepReport

SampleKey = tuple[RequestId, int]


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """A step and the time in seconds at which it ended, on the clock of the arrival."""

    end_s: float
    report: StepReport


@dataclass(frozen=True, kw_only=True)
class SampleLatency:
    """The latencies of one finished sample in milliseconds; ``tpot_ms`` None for one token."""

    ttft_ms: float
    tpot_ms: float | None
    e2e_ms: float
    itl_ms: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Statistics of one latency over samples (or tokens), in its unit."""

    mean: float
    median: float
    std: float
    p50: float
    p90: float
    p95: float
    p99: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Load:
    """How full the engine was after each step: sequences that ran, and blocks in use."""

    running_p50: float
    running_max: int
    used_blocks_max: int


def token_times(events: Sequence[StepEvent]) -> dict[SampleKey, list[float]]:
    """The time in seconds of every token of every sample."""
    times: dict[SampleKey, list[float]] = {}
    for event in events:
        for request_id, sample, count in event.report.committed:
            times.setdefault((request_id, sample), []).extend([event.end_s] * count)
    return times


def sample_latencies(
    events: Sequence[StepEvent], *, arrival_s: float, finished: Collection[SampleKey]
) -> dict[SampleKey, SampleLatency]:
    """The latencies of the *finished* samples that have at least one token."""
    times = token_times(events)
    return {key: _latency(times[key], arrival_s) for key in finished if times.get(key)}


def distribution(values: Sequence[float]) -> Distribution | None:
    """The statistics of *values*; None without any."""
    if not values:
        return None
    array = np.asarray(values, dtype=np.float64)
    p50, p90, p95, p99 = (float(one) for one in np.percentile(array, (50, 90, 95, 99)))
    return Distribution(
        mean=float(array.mean()),
        median=p50,
        std=float(array.std()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
    )


def load_of(events: Sequence[StepEvent]) -> Load:
    """The load over *events*, of which there is at least one; steps count equally."""
    running = [event.report.running for event in events]
    return Load(
        running_p50=float(np.percentile(running, 50)),
        running_max=max(running),
        used_blocks_max=max(event.report.used_blocks for event in events),
    )


def _latency(times_s: Sequence[float], arrival_s: float) -> SampleLatency:
    ttft_s = times_s[0] - arrival_s
    e2e_s = times_s[-1] - arrival_s
    gaps = len(times_s) - 1
    return SampleLatency(
        ttft_ms=1e3 * ttft_s,
        tpot_ms=1e3 * (e2e_s - ttft_s) / gaps if gaps else None,
        e2e_ms=1e3 * e2e_s,
        itl_ms=tuple(1e3 * gap for gap in np.diff(times_s).tolist()),
    )
