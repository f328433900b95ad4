"""Whether the proof would have seen a fault: planted ones, and how often ``fast`` differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Request
from pagedctl.errors import PagedctlError
from pagedctl.verify.comparison import first_difference
from pagedctl.verify.invariance_requests import RequestMaker
from pagedctl.verify.legs import Engines, Leg, OnStep, Probe, no_news
from pagedctl.verify.planted_faults import PlantedFault
from pagedctl.verify.reference import Reference
from pagedctl_kernels.registry import Registry

REQUESTS = 6
MOST_TOKENS = 12
FAST_REQUESTS = 16
FAST_TOKENS = 16
FILLERS = 8


@dataclass(frozen=True, kw_only=True)
class Measured:
    """How many of some requests differ between alone and packed, and by their tokens alone."""

    requests: int
    requests_differing: int
    requests_differing_in_tokens: int


@dataclass(frozen=True, kw_only=True)
class FaultResult:
    """What became of a planted fault; ``reason`` says why it could not be tried."""

    name: str
    description: str
    measured: Measured | None
    reason: str | None = None

    @property
    def caught(self) -> bool:
        return self.measured is not None and self.measured.requests_differing > 0

    def sentence(self) -> str:
        """``caught in 8 of 8 requests, in the tokens of 2``."""
        found = self.measured
        if found is None:
            return f"not tried: {self.reason}"
        if not self.caught:
            return f"NOT CAUGHT in {found.requests} requests"
        tokens = found.requests_differing_in_tokens
        seen = f"in the tokens of {tokens}" if tokens else "tokens alone would not have seen it"
        return f"caught in {found.requests_differing} of {found.requests} requests, {seen}"

    def to_json_object(self) -> dict[str, object]:
        """What the manifest says of it."""
        found = self.measured
        return {
            "name": self.name,
            "description": self.description,
            "caught": self.caught,
            "reason": self.reason,
            "requests": None if found is None else found.requests,
            "requests_differing": None if found is None else found.requests_differing,
            "requests_differing_in_tokens": None
            if found is None
            else found.requests_differing_in_tokens,
        }


def try_fault(
    fault: PlantedFault, config: EngineConfig, maker: RequestMaker, *, on_step: OnStep = no_news
) -> FaultResult:
    """Run a few requests alone and packed on an engine with the faulty leaf."""
    requests = _requests(maker, REQUESTS, MOST_TOKENS)
    reason = measured = None
    try:
        measured = _measure(fault.config_for(config), requests, maker, fault.registry, on_step)
    except PagedctlError as error:
        reason = error.what
    return FaultResult(
        name=fault.name, description=fault.description, measured=measured, reason=reason
    )


def measure_fast(
    config: EngineConfig, maker: RequestMaker, number: int, *, on_step: OnStep = no_news
) -> Measured | None:
    """How often some requests, at most *number*, differ under ``fast``; None if it cannot run."""
    tokens = min(FAST_TOKENS, maker.max_tokens)
    requests = _requests(maker, min(FAST_REQUESTS, number), tokens)
    try:
        fast = config.with_options(numerics="fast", topology_invariant=None)
        return _measure(fast, requests, maker, None, on_step)
    except PagedctlError:
        return None


def _measure(
    config: EngineConfig,
    requests: Sequence[Request],
    maker: RequestMaker,
    registry: Registry | None,
    on_step: OnStep,
) -> Measured:
    """Alone against one batch with as many fillers, on an engine that loads the model anew."""
    with Engine(config, registry=registry, needs_record=False) as engine:
        engines = Engines(engine)
        reference = Reference(engines)
        reference.prepare(requests, on_step=on_step)
        leg = Leg(
            name="packed",
            probes=tuple(map(Probe.plain, requests)),
            fillers=tuple(maker.fillers("power", FILLERS)),
            options={"prefix_cache": False},
        )
        ((_, trace),) = engines.traces([leg], on_step=on_step)
    differing = in_tokens = 0
    for probe in leg.probes:
        expected = reference.expected(probe, 0)
        found = trace.answers[probe.request.id, 0]
        differing += first_difference(expected, found) is not None
        in_tokens += expected.token_ids.tolist() != found.token_ids.tolist()
    return Measured(
        requests=len(requests),
        requests_differing=differing,
        requests_differing_in_tokens=in_tokens,
    )


def _requests(maker: RequestMaker, number: int, tokens: int) -> list[Request]:
    """Requests of *tokens* output tokens, as far as there is room: one greedy, the others at a
    temperature at which another stream soon draws another token."""
    random = maker.random("power")
    most = maker.max_prompt + maker.max_tokens
    tokens = min(tokens, most - 1)
    return [
        Request(
            id=f"power {place}",
            prompt_token_ids=maker.prompt(random)[: most - tokens],
            params=maker.params(place, max_tokens=tokens, temperature=2.0 * (place > 0)),
        )
        for place in range(number)
    ]
