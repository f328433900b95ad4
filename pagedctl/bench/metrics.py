"""From timed repeats to the figures of a manifest: medians, spreads and raw samples.

Definitions, per repeat:

* ``wall_s``: from before the first request is submitted to the end of the last step.
* ``prompt_tokens``: of completed requests, each request once whatever its ``n``.
* ``output_tokens``: of their finished samples.
* rates divide by ``wall_s``; ``tokens_per_s_end_to_end`` divides output tokens by the time
  that also reading and tokenising the requests takes.
* ``len_p50``: the upper median of the samples' output lengths.
* ``preemptions``, ``forward_tokens``, ``prefix_hit_tokens``: counted during the repeat.
* ``running_p50``, ``running_max``: sequences after a step; ``kv_used_max``: the largest share
  of the pool in use, from 0 to 1. Over repeats, the largest.

``metrics`` hold the median over repeats of each figure (counts: the lower median, so that they
stay whole), of each statistic of a latency likewise. ``peak_device_mib`` is the maximum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_high, median_low
from typing import get_args

from pagedctl.bench.timing import Distribution, Load, SampleKey, SampleLatency, distribution
from pagedctl.engine.request import (
    Capacity,
    Completion,
    FinishReason,
    RequestFailure,
    Stats,
)

FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
_PER_SAMPLE = ("ttft_ms", "tpot_ms", "e2e_ms")

Figures = dict[str, int | float | None]


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """One timed run of a whole workload.

    ``completions`` are in the order of the workload, then by sample. ``counted`` holds the
    engine's counters of this run alone.
    """

    wall_s: float
    completions: tuple[Completion, ...]
    latencies: Mapping[SampleKey, SampleLatency]
    load: Load
    counted: Stats
    peak_device_mib: int | None = None

    @property
    def finished(self) -> list[Completion]:
        return [one for one in self.completions if one.error is None]

    @property
    def failures(self) -> list[RequestFailure]:
        return [one.error for one in self.completions if one.error is not None]


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """What a bench found.

    ``metrics`` and ``samples`` are the manifest's. ``spread`` has the least and the largest
    value over repeats of each scalar figure. ``failures`` are those of the last repeat.
    """

    metrics: Mapping[str, object]
    samples: Mapping[str, object]
    spread: Mapping[str, tuple[float, float]]
    failures: tuple[RequestFailure, ...]


def summarize(repeats: Sequence[Repeat], capacity: Capacity, *, prepare_s: float) -> BenchResult:
    """The result over *repeats*, of which there is at least one."""
    figures = [_figures(one, prepare_s) for one in repeats]
    columns = {name: [one[name] for one in figures] for name in figures[0]}
    scalars = {name: _middle(column) for name, column in columns.items()}
    lengths = {name: scalars.pop(name) for name in ("len_p50", "len_max")}
    counters = {
        name: scalars.pop(name) for name in ("preemptions", "forward_tokens", "prefix_hit_tokens")
    }
    metrics = {
        **scalars,
        **{name: _middle_distribution(repeats, name) for name in LATENCIES},
        "kv_tokens": capacity.kv_tokens,
        "max_concurrency_at_cap": capacity.max_concurrency_at_cap,
        "peak_device_mib": _largest([one.peak_device_mib for one in repeats]),
        "finish_reasons": _finish_reasons(repeats),
        **lengths,
        **counters,
        **_load(repeats, capacity),
    }
    return BenchResult(
        metrics=metrics,
        samples={**columns, **_per_sample(repeats)},
        spread={
            name: (min(values), max(values))
            for name, column in columns.items()
            if len(values := [one for one in column if one is not None]) == len(column)
        },
        failures=tuple(repeats[-1].failures),
    )


def _load(repeats: Sequence[Repeat], capacity: Capacity) -> Figures:
    return {
        "running_p50": max(one.load.running_p50 for one in repeats),
        "running_max": max(one.load.running_max for one in repeats),
        "kv_used_max": max(one.load.used_blocks_max for one in repeats) / capacity.kv_blocks,
    }


def _figures(repeat: Repeat, prepare_s: float) -> Figures:
    """The scalar figures of one repeat, in the manifest's order."""
    failed = {one.id for one in repeat.completions if one.error is not None}
    prompts = {
        one.id: len(one.prompt_token_ids) for one in repeat.completions if one.id not in failed
    }
    lengths = [len(one.token_ids) for one in repeat.finished]
    prompt_tokens, output_tokens = sum(prompts.values()), sum(lengths)
    return {
        "wall_s": repeat.wall_s,
        "requests_completed": len(prompts),
        "requests_failed": len(failed),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / repeat.wall_s,
        "total_tokens_per_s": (prompt_tokens + output_tokens) / repeat.wall_s,
        "tokens_per_s_end_to_end": output_tokens / (repeat.wall_s + prepare_s),
        "requests_per_s": len(prompts) / repeat.wall_s,
        "len_p50": median_high(lengths) if lengths else None,
        "len_max": max(lengths, default=None),
        "preemptions": repeat.counted.preemptions,
        "forward_tokens": repeat.counted.forward_tokens,
        "prefix_hit_tokens": repeat.counted.prefix_hit_tokens,
    }


def _middle(column: Sequence[int | float | None]) -> int | float | None:
    values = [one for one in column if one is not None]
    if len(values) < len(column):
        return None
    return median_low(values) if all(isinstance(one, int) for one in values) else median(values)


def _middle_distribution(repeats: Sequence[Repeat], name: str) -> dict[str, float] | None:
    """Each statistic's median over repeats; None if a repeat has no value."""
    found = [_distribution(one, name) for one in repeats]
    dicts = [one.as_dict() for one in found if one is not None]
    if len(dicts) < len(found):
        return None
    return {statistic: median(one[statistic] for one in dicts) for statistic in dicts[0]}


def _distribution(repeat: Repeat, name: str) -> Distribution | None:
    if name == "itl_ms":
        gaps = [gap for one in repeat.latencies.values() for gap in one.itl_ms]
        return distribution(gaps)
    values = [getattr(one, name) for one in repeat.latencies.values()]
    return distribution([value for value in values if value is not None])


def _finish_reasons(repeats: Sequence[Repeat]) -> dict[str, int]:
    return {
        reason: median_low(
            sum(one.finish_reason == reason for one in repeat.completions) for repeat in repeats
        )
        for reason in FINISH_REASONS
    }


def _per_sample(repeats: Sequence[Repeat]) -> dict[str, object]:
    """Latencies and lengths of each sample, a list per repeat, in the order of the workload."""
    latencies = {
        name: [[_of_sample(repeat, one, name) for one in repeat.completions] for repeat in repeats]
        for name in _PER_SAMPLE
    }
    lengths = [[len(one.token_ids) for one in repeat.completions] for repeat in repeats]
    return {**latencies, "sample_output_tokens": lengths}


def _of_sample(repeat: Repeat, completion: Completion, name: str) -> float | None:
    """A latency in milliseconds, to the nanosecond; None where the sample has none."""
    latency = repeat.latencies.get((completion.id, completion.sample))
    value = None if latency is None else getattr(latency, name)
    return None if value is None else round(value, 6)


def _largest(values: Sequence[int | None]) -> int | None:
    return max((one for one in values if one is not None), default=None)
