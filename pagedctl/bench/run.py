"""Serve a workload several times and take medians.

The engine never reads the clock; the bench reads it once after every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pagedctl.bench.metrics import BenchResult, Repeat, summarize
from pagedctl.bench.timing import StepEvent, load_of, sample_latencies
from pagedctl.bench.workloads import Workload
from pagedctl.engine.request import Capacity, Completion, Request, Stats
from pagedctl.engine.step_report import StepReport

ShowProgress = Callable[[int, int, str], None]
"""Told after every step: how much is done, of how much, and in which run."""


class BenchEngine(Protocol):
    """What a bench needs of an engine."""

    def submit(self, request: Request) -> None: ...

    def has_unfinished(self) -> bool: ...

    def step(self) -> list[Completion]: ...

    def last_step(self) -> StepReport: ...

    def stats(self) -> Stats: ...

    def capacity(self) -> Capacity: ...

    def reset_prefix_cache(self) -> int: ...


def no_progress(done: int, total: int, text: str) -> None:
    """Show nothing."""


def no_device() -> int | None:
    """The peak of device memory where there is no device: not measured."""
    return None


def drop(result: BenchResult) -> None:
    """Keep nothing."""


def progress_unit(workload: Workload) -> str:
    """What progress counts: output tokens if their number is known, else samples."""
    return "tokens" if workload.exact_lengths else "samples"


def run_bench(
    engine: BenchEngine,
    workload: Workload,
    *,
    warmup: int,
    repeats: int,
    prepare_s: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
    progress: ShowProgress = no_progress,
    peak_device_mib: Callable[[], int | None] = no_device,
    keep: Callable[[BenchResult], None] = drop,
) -> BenchResult:
    """Serve *workload* *warmup* times untimed, then *repeats* times (at least once) timed.

    ``prepare_s`` are the seconds that reading and tokenising the requests took, once.
    ``peak_device_mib`` is asked after each repeat. ``keep`` gets the result of the finished
    repeats, if there are any, where something ends the bench early. All requests are submitted
    before the first step. Raises RequestError for a request that the engine refuses: what is
    measured is all of the workload or nothing.

    Example::

        result = run_bench(engine, workload, warmup=1, repeats=3)
        result.metrics["output_tokens_per_s"]
    """
    bench = _Bench(engine=engine, workload=workload, clock=clock, progress=progress)
    for number in range(1, warmup + 1):
        bench.serve(f"warm-up {number} of {warmup}")
    timed: list[Repeat] = []
    try:
        for number in range(1, repeats + 1):
            timed.append(bench.timed(f"repeat {number} of {repeats}", peak_device_mib))
    except BaseException:
        if timed:
            keep(summarize(timed, engine.capacity(), prepare_s=prepare_s))
        raise
    return summarize(timed, engine.capacity(), prepare_s=prepare_s)


@dataclass(frozen=True, kw_only=True)
class _Served:
    """One run as recorded: times in seconds, steps, and completions as they finished."""

    start_s: float
    end_s: float
    events: list[StepEvent]
    completions: list[Completion]


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """An engine, its work, and the clock."""

    engine: BenchEngine
    workload: Workload
    clock: Callable[[], float]
    progress: ShowProgress

    def serve(self, label: str) -> _Served:
        """Serve the workload once, recording the end of every step.

        Blocks that an earlier run left cached would turn its prefills into hits: they go first.
        """
        self.engine.reset_prefix_cache()
        events: list[StepEvent] = []
        completions: list[Completion] = []
        counter = _Counter(self.workload)
        start_s = self.clock()
        for request in self.workload.requests:
            self.engine.submit(request)
        while self.engine.has_unfinished():
            finished = self.engine.step()
            event = StepEvent(end_s=self.clock(), report=self.engine.last_step())
            completions.extend(finished)
            events.append(event)
            counter.add(event.report, len(finished))
            self.progress(counter.done, counter.total, label)
        self._require_exact_lengths(completions)
        return _Served(
            start_s=start_s, end_s=events[-1].end_s, events=events, completions=completions
        )

    def timed(self, label: str, peak_device_mib: Callable[[], int | None]) -> Repeat:
        """Serve the workload once and keep what the figures need."""
        before = self.engine.stats()
        served = self.serve(label)
        after = self.engine.stats()
        found = {(one.id, one.sample): one for one in served.completions}
        finished = [key for key, one in found.items() if one.error is None]
        return Repeat(
            wall_s=served.end_s - served.start_s,
            completions=tuple(found[key] for key in self._sample_keys()),
            latencies=sample_latencies(served.events, arrival_s=served.start_s, finished=finished),
            load=load_of(served.events),
            counted=_counted(before, after),
            peak_device_mib=peak_device_mib(),
        )

    def _sample_keys(self) -> list[tuple[int | str, int]]:
        return [
            (request.id, sample)
            for request in self.workload.requests
            for sample in range(request.params.n)
        ]

    def _require_exact_lengths(self, completions: list[Completion]) -> None:
        """Rates of engines can be compared only if all do the same work."""
        if not self.workload.exact_lengths:
            return
        wanted = {one.id: one.params.max_tokens for one in self.workload.requests}
        for one in completions:
            if one.error is None and len(one.token_ids) != wanted[one.id]:
                raise RuntimeError(
                    f"request {one.id} gave {len(one.token_ids)} tokens, not {wanted[one.id]}"
                )


class _Counter:
    """Progress of one run, in the workload's unit."""

    def __init__(self, workload: Workload) -> None:
        self._in_tokens = workload.exact_lengths
        self.done = 0
        self.total = workload.output_tokens if self._in_tokens else workload.num_samples

    def add(self, report: StepReport, finished: int) -> None:
        committed = sum(count for _, _, count in report.committed)
        self.done += committed if self._in_tokens else finished


def _counted(before: Stats, after: Stats) -> Stats:
    """The counters' increase; the load is that of *after*."""
    return Stats(
        running=after.running,
        waiting=after.waiting,
        free_blocks=after.free_blocks,
        cached_blocks=after.cached_blocks,
        steps=after.steps - before.steps,
        forward_tokens=after.forward_tokens - before.forward_tokens,
        prefix_hit_tokens=after.prefix_hit_tokens - before.prefix_hit_tokens,
        preemptions=after.preemptions - before.preemptions,
        output_tokens=after.output_tokens - before.output_tokens,
    )
