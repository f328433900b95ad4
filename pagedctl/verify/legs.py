"""One run of a proof: requests of known answers among others, on an engine of some options.

A leg is data, and it decides everything: the order of the requests, when each arrives, who
else is there. So it can be run again, here or in another process, to the same steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from random import Random

import numpy as np

from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Completion, Request, RequestId, ScoreRequest
from pagedctl.verify.comparison import Answer, answer_of

Key = tuple[RequestId, int]
"""(request id, sample)."""

OnStep = Callable[[str], None]
"""Told after every step what is being run."""

Watch = Callable[[Engine], AbstractContextManager[object]]
"""Looks at an engine while it runs a leg."""


def no_news(text: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A request whose answer is known: output tokens [first, end) of what ``of`` gives alone.

    ``cached_tokens`` are those that must be found in the prefix cache, None: any number.
    """

    request: Request
    of: Request
    first: int = 0
    end: int | None = None
    cached_tokens: int | None = None

    @classmethod
    def plain(cls, request: Request, cached_tokens: int | None = None) -> Probe:
        """The request itself: alone and here it gives the same."""
        return cls(request=request, of=request, cached_tokens=cached_tokens)


@dataclass(frozen=True, kw_only=True)
class Leg:
    """A run: the ``probes`` and the ``fillers`` in one random order, over an engine of ``options``.

    The order, and the step of [0, ``arrivals``] in which each arrives, follow from ``order``, or
    from the name without one. ``rows`` is how many rows must be resident at once, and ``needs``
    names the counters of the trace that must not be 0: otherwise the run proved nothing.
    ``continues``: it runs on the engine of the leg before. ``fillers_first``: all fillers arrive
    at step 0. ``scores``: the probes' sequences are scored, from the end of ``of``'s prompt on.
    """

    name: str
    probes: tuple[Probe, ...]
    order: str = ""
    fillers: tuple[Request, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)
    arrivals: int = 0
    rows: int | None = None
    needs: tuple[str, ...] = ()
    continues: bool = False
    fillers_first: bool = False
    scores: bool = False

    def schedule(self) -> list[tuple[int, Request]]:
        """(step of arrival, request), in the order of arrival."""
        random = Random(self.order or self.name)
        requests = [probe.request for probe in self.probes] + list(self.fillers)
        random.shuffle(requests)
        timed = [(self._arrival(one, random), one) for one in requests]
        return sorted(timed, key=lambda pair: pair[0])

    def _arrival(self, request: Request, random: Random) -> int:
        early = self.fillers_first and request in self.fillers
        return 0 if early else random.randint(0, self.arrivals)


@dataclass(frozen=True, kw_only=True)
class LegTrace:
    """What a leg gave, and what it exercised.

    ``rows`` counts steps by the rows that were resident. ``chunk_splits`` are rows that ended
    inside a prompt, ``overshoots`` those that were computed behind a stop. ``preemptions`` and
    ``prefix_hit_tokens`` are those of the probes alone, ``cached_tokens`` of each of them.
    """

    answers: Mapping[Key, Answer]
    cached_tokens: Mapping[Key, int]
    rows: Mapping[int, int]
    chunk_splits: int
    overshoots: int
    preemptions: int
    prefix_hit_tokens: int

    @property
    def most_rows(self) -> int:
        return max(self.rows, default=0)

    def counter(self, name: str) -> int:
        """One of the counters by its field."""
        value = getattr(self, name)
        assert isinstance(value, int)
        return value


def run_leg(
    engine: Engine, leg: Leg, *, on_step: OnStep = no_news, watch: Watch | None = None
) -> LegTrace:
    """Run *leg* on *engine*, which is idle and has the leg's options."""
    with watch(engine) if watch else nullcontext():
        return _scored(engine, leg, on_step) if leg.scores else _served(engine, leg, on_step)


def _served(engine: Engine, leg: Leg, on_step: OnStep) -> LegTrace:
    wanted = {probe.request.id for probe in leg.probes}
    pending = leg.schedule()[::-1]
    found: dict[Key, Completion] = {}
    tally = _Tally()
    before = engine.stats().output_tokens
    while pending or engine.has_unfinished():
        while pending and (pending[-1][0] <= tally.steps or not engine.has_unfinished()):
            engine.submit(pending.pop()[1])
        done = engine.step()
        tally.add(engine)
        found.update({(one.id, one.sample): one for one in done if one.id in wanted})
        on_step(leg.name)
    output_tokens = engine.stats().output_tokens - before
    return LegTrace(
        answers={key: answer_of(one) for key, one in found.items()},
        cached_tokens={key: one.cached_tokens for key, one in found.items()},
        rows=dict(sorted(tally.rows.items())),
        chunk_splits=tally.num_rows - tally.num_sampled,
        overshoots=tally.num_sampled - output_tokens,
        preemptions=sum(one.preemptions for one in found.values()),
        prefix_hit_tokens=sum(one.cached_tokens for one in found.values()),
    )


def _scored(engine: Engine, leg: Leg, on_step: OnStep) -> LegTrace:
    """The logprobs that :meth:`Engine.scores` gives for sequences that were generated."""
    probes = {probe.request.id: probe for probe in leg.probes}
    asked = [
        ScoreRequest(
            id=request.id,
            token_ids=request.prompt_token_ids,
            start=len(probes[request.id].of.prompt_token_ids),
            temperature=request.params.temperature,
        )
        for _, request in leg.schedule()
    ]
    answers: dict[Key, Answer] = {}
    for one in engine.scores(asked):
        ids = probes[one.id].request.prompt_token_ids[one.start :]
        answers[one.id, one.sample] = Answer(
            start=one.start,
            token_ids=np.array(ids, dtype=np.int32),
            logprobs=one.logprobs,
            failure=None if one.error is None else one.error.kind,
        )
        on_step(leg.name)
    return LegTrace(
        answers=answers,
        cached_tokens={},
        rows={},
        chunk_splits=0,
        overshoots=0,
        preemptions=0,
        prefix_hit_tokens=0,
    )


class _Tally:
    """Sums over steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.num_rows = 0
        self.num_sampled = 0
        self.rows: Counter[int] = Counter()

    def add(self, engine: Engine) -> None:
        report = engine.last_step()
        self.steps += 1
        self.num_rows += report.num_rows
        self.num_sampled += report.num_sampled
        if report.num_rows:
            self.rows[report.num_rows] += 1


class Engines:
    """The engines of one proof: each has options of its own, and all share one loaded model."""

    def __init__(self, first: Engine) -> None:
        self.first = first

    @contextmanager
    def open(self, options: Mapping[str, object]) -> Iterator[Engine]:
        """An engine with *options* over those of the first."""
        config = self.first.config.with_options(**options)
        with Engine(config, sharing=self.first, needs_record=False) as engine:
            yield engine

    def traces(
        self,
        legs: Sequence[Leg],
        *,
        on_step: OnStep = no_news,
        watches: Mapping[str, Watch] | None = None,
    ) -> Iterator[tuple[Leg, LegTrace]]:
        """Run *legs* in order; ``watches`` are by the name of the leg."""
        for series in _series(legs):
            with self.open(series[0].options) as engine:
                for leg in series:
                    watch = (watches or {}).get(leg.name)
                    yield leg, run_leg(engine, leg, on_step=on_step, watch=watch)


def series_of(legs: Sequence[Leg], name: str) -> list[Leg]:
    """The leg of that name behind those whose engine it continues on."""
    for series in _series(legs):
        names = [leg.name for leg in series]
        if name in names:
            return series[: names.index(name) + 1]
    raise KeyError(name)


def _series(legs: Iterable[Leg]) -> Iterator[list[Leg]]:
    """Legs that run on one engine, in order."""
    series: list[Leg] = []
    for leg in legs:
        if series and not leg.continues:
            yield series
            series = []
        series.append(leg)
    if series:
        yield series
