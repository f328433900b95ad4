"""Which op made a request differ: the run alone and the run that failed once more, watched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pagedctl.engine.engine import Engine
from pagedctl.engine.request import RequestId
from pagedctl.verify.comparison import Divergence
from pagedctl.verify.judgement import divergences
from pagedctl.verify.legs import Engines, Leg, OnStep, Probe, no_news, series_of
from pagedctl.verify.localisation import Suspect, suspect_of
from pagedctl.verify.recorder import Recorder
from pagedctl.verify.reference import Reference, alone_leg
from pagedctl.verify.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Located:
    """What a second, watched run of a divergence found.

    ``suspect`` is None if the request did not differ again: then the run does not repeat itself,
    or differs in the other process only.
    """

    suspect: Suspect | None

    def sentence(self) -> str:
        if self.suspect is None:
            return "suspect: none; the run gave equal bits when it was repeated here"
        found = self.suspect
        leaf = "no leaf" if found.leaf is None else f"leaf {found.leaf}"
        return f"suspect: {found.text} · switch {found.switch}, {leaf}"

    def to_json_object(self) -> dict[str, object]:
        """What the manifest says of it."""
        if self.suspect is None:
            return {"repeated": False}
        found = self.suspect
        return {
            "repeated": True,
            "op": found.op,
            "site": found.site,
            "layer": found.layer,
            "leaf": found.leaf,
            "switch": found.switch,
            "position": found.position,
            "text": found.text,
        }


def locate(
    divergence: Divergence,
    legs: Sequence[Leg],
    engines: Engines,
    reference: Reference,
    *,
    on_step: OnStep = no_news,
) -> Located:
    """Run the request alone and the failing one of *legs* again, and compare every op's rows."""
    series = series_of(legs, divergence.run)
    leg = series[-1]
    probe = next(one for one in leg.probes if one.request.id == divergence.asked_id)
    sample = divergence.sample
    alone = _Watcher(probe.of.id, sample)
    packed = _Watcher(_recorded_id(leg, probe), sample)
    watches = {"alone": alone.watch, leg.name: packed.watch}
    runs = [alone_leg(probe.of), *series]
    *_, (_, trace) = engines.traces(runs, on_step=on_step, watches=watches)
    again = [
        one
        for one in divergences(divergence.case, leg, trace, reference)
        if (one.asked_id, one.sample) == (divergence.asked_id, sample)
    ]
    if not again:
        return Located(suspect=None)
    position = again[0].difference.position
    return Located(suspect=suspect_of(alone.trace, packed.trace, position=position))


class _Watcher:
    """Records one sample of an engine's run."""

    def __init__(self, request_id: RequestId, sample: int) -> None:
        self._request_id = request_id
        self._sample = sample
        self.trace = Trace(leaves={})

    @contextmanager
    def watch(self, engine: Engine) -> Iterator[None]:
        with Recorder(engine, self._request_id, self._sample) as self.trace:
            yield


def _recorded_id(leg: Leg, probe: Probe) -> RequestId:
    """How the engine calls the request: a score's id is its place."""
    if not leg.scores:
        return probe.request.id
    return [request.id for _, request in leg.schedule()].index(probe.request.id)
