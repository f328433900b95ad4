"""What each request gives by itself: the answers that every other run is held to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from pagedctl.engine.request import Request
from pagedctl.errors import PagedctlError
from pagedctl.verify.comparison import Answer
from pagedctl.verify.legs import Engines, Leg, OnStep, Probe, no_news, run_leg

ALONE: Mapping[str, object] = {
    "max_num_seqs": 1,
    "prefix_cache": False,
    "debug_force_preemption_interval": None,
}
"""One sequence at a time, and nothing that an earlier one left."""


def alone_leg(request: Request, name: str = "alone") -> Leg:
    """*request* by itself."""
    return Leg(name=name, probes=(Probe.plain(request),), options=ALONE)


class Reference:
    """The answers of requests that were run alone, each once; ``rows`` as a trace has them."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._answers: dict[Request, tuple[Answer, ...]] = {}
        self.rows: Counter[int] = Counter()

    def prepare(self, requests: Iterable[Request], *, on_step: OnStep = no_news) -> None:
        """Run those of *requests* that were not run yet; raises PagedctlError if one fails."""
        missing = [one for one in dict.fromkeys(requests) if one not in self._answers]
        if not missing:
            return
        with self._engines.open(ALONE) as engine:
            for number, request in enumerate(missing, start=1):
                leg = alone_leg(request, f"request {number} of {len(missing)}")
                trace = run_leg(engine, leg, on_step=on_step)
                samples = range(request.params.n)
                answers = tuple(trace.answers[request.id, sample] for sample in samples)
                self._answers[request] = _sound(request, answers)
                self.rows.update(trace.rows)

    def answers(self, request: Request) -> tuple[Answer, ...]:
        """Its samples."""
        self.prepare([request])
        return self._answers[request]

    def expected(self, probe: Probe, sample: int) -> Answer:
        """What *probe* must give."""
        whole = self.answers(probe.of)[sample]
        if probe.first == 0 and probe.end is None:
            return whole
        return whole.part(probe.first, probe.end)


def _sound(request: Request, answers: tuple[Answer, ...]) -> tuple[Answer, ...]:
    failed = [one.failure for one in answers if one.failure is not None]
    if failed:
        raise PagedctlError(
            f"request {request.id} failed by itself: {failed[0]}",
            where="the run of each request alone",
            rule="a proof compares answers, and a request that fails has none",
            remedy="see pagedctl generate for what went wrong with this model",
        )
    return answers
