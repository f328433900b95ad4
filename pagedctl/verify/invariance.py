"""The proof of invariance: every case on one model, its power, and what the engine pins."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.engine import Engine
from pagedctl.engine.kv_cache import block_bytes
from pagedctl.engine.request import Request
from pagedctl.errors import NumericsRefused
from pagedctl.models.locate import EMBEDDED_NAME
from pagedctl.numerics.plugins import installed
from pagedctl.verify.case_legs import Subject
from pagedctl.verify.case_result import CaseResult
from pagedctl.verify.cases import ALONE, CASES, PROCESS, Case, not_applicable
from pagedctl.verify.invariance_requests import (
    MixedPrompts,
    PromptSource,
    RandomPrompts,
    RequestMaker,
    WordProblemPrompts,
)
from pagedctl.verify.invariance_result import InvarianceResult
from pagedctl.verify.judgement import CaseJudge, few_rows
from pagedctl.verify.legs import Engines, Leg, LegTrace
from pagedctl.verify.planted_faults import planted_faults
from pagedctl.verify.power_check import FaultResult, measure_fast, try_fault
from pagedctl.verify.process_leg import traces_of_process
from pagedctl.verify.reference import Reference
from pagedctl.verify.selection_points import selection_points
from pagedctl.verify.suspects import Located, locate
from pagedctl_kernels.registry import Registry

ShowProgress = Callable[[int, int, str], None]
"""Told after every step: how many parts of the proof are done, of how many, and what runs."""

NOT_CHOSEN = "not among --cases"


def no_progress(done: int, total: int, text: str) -> None:
    """Show nothing."""


def require_promise(config: EngineConfig) -> None:
    """Raises NumericsRefused for a contract that promises no bits."""
    contract = config.contract.contract
    if not contract.bitwise:
        raise NumericsRefused(
            f"there is nothing to check: {contract.name} promises no bits",
            where=f"option numerics, set by {config.origins['numerics']}",
            rule="invariance proves a bitwise contract",
            remedy="use --numerics invariant",
        )


def request_maker(engine: Engine, max_tokens: int) -> RequestMaker:
    """Makes requests for *engine*: random ids, and for the embedded model word problems too."""
    tokenizer = engine.parts.model.tokenizer
    source: PromptSource = RandomPrompts(engine.spec.input_vocab_size)
    if engine.spec.name == EMBEDDED_NAME and tokenizer is not None:
        source = MixedPrompts(WordProblemPrompts(tokenizer), source)
    assert engine.config.max_model_len is not None
    return RequestMaker.of(
        source,
        max_model_len=engine.config.max_model_len,
        max_tokens=max_tokens,
        block_size=engine.config.block_size,
    )


@dataclass(frozen=True, kw_only=True)
class InvarianceProof:
    """What is to be proved of an engine, and how.

    ``cases`` are those that were chosen, None: all that apply. ``processes`` counts process
    lifetimes, this one included. ``bisect``: look for the op behind the first divergence.

    Example::

        with Engine(config, needs_record=False) as engine:
            maker = request_maker(engine, max_tokens=64)
            proof = InvarianceProof(engine=engine, maker=maker, requests=maker.requests(64))
            result = proof.run()
    """

    engine: Engine
    maker: RequestMaker
    requests: tuple[Request, ...]
    cases: tuple[str, ...] | None = None
    processes: int = 2
    bisect: bool = True
    registry: Registry | None = None

    def run(self, progress: ShowProgress = no_progress) -> InvarianceResult:
        """Run every case, plant the faults, and say what came of it."""
        return _Run(self, progress).result()


class _Run:
    """One run of a proof."""

    def __init__(self, proof: InvarianceProof, progress: ShowProgress) -> None:
        self._proof = proof
        self._progress = progress
        self._engines = Engines(proof.engine)
        self._subject = Subject(
            config=proof.engine.config,
            block_bytes=block_bytes(proof.engine.spec, proof.engine.config),
            vocab_size=proof.engine.spec.output_vocab_size,
            maker=proof.maker,
            requests=proof.requests,
            reference=Reference(self._engines),
        )
        self._legs: dict[str, list[Leg]] = {}
        registry = proof.registry or installed().leaves
        self._faults = planted_faults(registry)
        self._done = 0
        self._total = len(CASES) + len(self._faults) + 1

    def result(self) -> InvarianceResult:
        started_s = time.perf_counter()
        results = [self._case(case) for case in CASES.values()]
        faults = [self._fault(number) for number in range(len(self._faults))]
        config = self._subject.config
        number = len(self._subject.requests)
        fast = measure_fast(config, self._proof.maker, number, on_step=self._told("fast"))
        missing = self._proof.engine.parts.verification.eligibility.missing
        ran = frozenset(one.name for one in results if one.not_run is None)
        return InvarianceResult(
            contract=config.contract.contract.name,
            still_needed=tuple(one for one in missing if one != "invariance"),
            cases=tuple(results),
            is_whole=self._proof.cases is None and self._proof.processes > 1,
            faults=tuple(faults),
            fast=fast,
            points=selection_points(self._proof.engine, ran),
            located=self._locate(results),
            wall_s=time.perf_counter() - started_s,
        )

    def _case(self, case: Case) -> CaseResult:
        started_s = time.perf_counter()
        chosen = self._proof.cases
        reason = None
        if chosen is not None and case.name not in (*chosen, ALONE):
            reason = NOT_CHOSEN
        reason = reason or not_applicable(case, self._subject, self._proof.processes)
        if reason is not None:
            result = CaseResult(name=case.name, not_run=reason)
        elif case.least_rows > 1 and self._subject.config.max_num_seqs == 1:
            result = CaseResult(
                name=case.name, lacks=tuple(few_rows(case, 1, self._subject.config))
            )
        elif case.name == ALONE:
            result = self._alone(started_s)
        else:
            result = self._compared(case, started_s)
        self._done += 1
        return result

    def _alone(self, started_s: float) -> CaseResult:
        """The reference of the requests that several cases share."""
        subject = self._subject
        subject.reference.prepare(subject.requests, on_step=self._told(ALONE))
        tokens = sum(one.params.max_tokens or 0 for one in subject.requests)
        return CaseResult(
            name=ALONE,
            runs=1,
            requests=len(subject.requests),
            tokens=tokens,
            rows=dict(subject.reference.rows),
            is_reference=True,
            wall_s=time.perf_counter() - started_s,
        )

    def _compared(self, case: Case, started_s: float) -> CaseResult:
        subject, told = self._subject, self._told(case.name)
        legs = list(case.legs(subject))
        subject.reference.prepare((probe.of for leg in legs for probe in leg.probes), on_step=told)
        judge = CaseJudge(case, subject.config, subject.reference)
        if case.name == PROCESS:
            legs = self._processes(legs, judge)
        else:
            for leg, trace in self._engines.traces(legs, on_step=told):
                judge.add(leg, trace)
        self._legs[case.name] = legs
        return judge.result(time.perf_counter() - started_s)

    def _processes(self, legs: Sequence[Leg], judge: CaseJudge) -> list[Leg]:
        """Run *legs* in each further process; the legs by the names under which they ran."""
        named = []
        for number in range(2, self._proof.processes + 1):
            self._told(PROCESS)(f"process {number}")
            own = [
                replace(leg, name=f"process {number}, {leg.name}", order=leg.name) for leg in legs
            ]
            traces: list[LegTrace] = traces_of_process(
                self._subject.config, own, number=number, environ=os.environ
            )
            for leg, trace in zip(own, traces, strict=True):
                judge.add(leg, trace)
            named += own
        return named

    def _fault(self, number: int) -> FaultResult:
        fault = self._faults[number]
        told = self._told(f"planted fault {fault.name}")
        found = try_fault(fault, self._subject.config, self._proof.maker, on_step=told)
        self._done += 1
        return found

    def _locate(self, results: Sequence[CaseResult]) -> Located | None:
        """The suspect behind the first divergence."""
        first = next((one for result in results for one in result.divergences), None)
        if first is None or not self._proof.bisect:
            return None
        return locate(
            first,
            self._legs[first.case],
            self._engines,
            self._subject.reference,
            on_step=self._told("suspect"),
        )

    def _told(self, part: str) -> Callable[[str], None]:
        def tell(text: str) -> None:
            self._progress(self._done, self._total, f"{part}: {text}")

        return tell
