"""Device times by CUDA graph: the candidates take turns, and each gets the median of its trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

TRIALS = 5
TRIAL_US = 10_000.0
"""Each trial replays a graph for about so long."""

Launch = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Microseconds of one call: every trial's."""

    trials_us: tuple[float, ...]

    @property
    def us(self) -> float:
        return median(self.trials_us)

    @property
    def spread_us(self) -> float:
        return max(self.trials_us) - min(self.trials_us)

    def over(self, other: Timing) -> float:
        """The median ratio of trials that followed each other: clocks drift over a run."""
        pairs = zip(self.trials_us, other.trials_us, strict=True)
        return median(mine / its for mine, its in pairs)


def replayed(
    candidates: Mapping[str, Sequence[Launch]], *, trials: int = TRIALS
) -> dict[str, Timing]:
    """Time of one launch of each candidate.

    A candidate is a sequence of launches over different buffers, one graph of all of them, so
    that no launch finds its operands in the cache. The candidates' trials alternate.
    """
    runs = {name: _graph(launches) for name, launches in candidates.items()}
    return _alternating(runs, {name: len(one) for name, one in candidates.items()}, trials)


def launched(
    candidates: Mapping[str, Sequence[Launch]], *, trials: int = TRIALS
) -> dict[str, Timing]:
    """The same without a graph: for work so long that launching it does not count."""
    runs = {name: _all(launches) for name, launches in candidates.items()}
    for run in runs.values():
        run()
    return _alternating(runs, {name: len(one) for name, one in candidates.items()}, trials)


def _alternating(
    runs: Mapping[str, Launch], calls: Mapping[str, int], trials: int
) -> dict[str, Timing]:
    repeats = {name: max(1, round(TRIAL_US / _timed(run, 1))) for name, run in runs.items()}
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(trials):
        for name, run in runs.items():
            found[name].append(_timed(run, repeats[name]) / calls[name])
    return {name: Timing(trials_us=tuple(times)) for name, times in found.items()}


def _all(launches: Sequence[Launch]) -> Launch:
    def run() -> None:
        for launch in launches:
            launch()

    return run


def _graph(launches: Sequence[Launch]) -> Launch:
    """A replay of all launches, after each ran once (compiling and checks stay outside)."""
    run = _all(launches)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return graph.replay


def _timed(run: Launch, repeats: int) -> float:
    """Microseconds of one run."""
    start, end = _event(), _event()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / repeats


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
