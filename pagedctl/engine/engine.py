"""The engine: requests in, completions out. Owns the loop and nothing else."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from types import TracebackType

import torch

from pagedctl.config.engine_config import EngineConfig
from pagedctl.config.groups import MAX_SEED
from pagedctl.config.kinds import Broken, Integer
from pagedctl.engine.build import EngineParts, build_parts
from pagedctl.engine.completions import (
    completion_of,
    non_finite_failure,
    sequences_of,
)
from pagedctl.engine.manifest_sections import fill_from_engine, fill_header
from pagedctl.engine.request import Capacity, Completion, Request, RequestId, Stats
from pagedctl.engine.request_check import RequestLimits, check_request
from pagedctl.engine.runner import LaunchedStep
from pagedctl.engine.scheduler import SequenceKey, key_of
from pagedctl.engine.sequence import Sequence
from pagedctl.engine.step_plan import StepPlan
from pagedctl.engine.step_report import StepReport
from pagedctl.errors import ConfigError, Fault, RequestError
from pagedctl.manifest.schema import Manifest
from pagedctl.manifest.writer import ManifestBuilder
from pagedctl.models.spec import ModelSpec


class Engine:
    """A sampler over one model.

    The host follows the device at exactly ``config.lag`` steps: step s is launched, then step
    s - lag is committed. No decision reads the clock.

    Example::

        with Engine(EngineConfig(model="embedded")) as engine:
            completions = engine.generate([Request(id=0, prompt_token_ids=(5, 6, 7))])
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        weights: Mapping[str, torch.Tensor] | None = None,
        *,
        run_seed: int = 0,
    ) -> None:
        """Build from *config*; *weights* (by Hugging Face name) stand in for files.

        ``run_seed`` seeds the requests that have no seed of their own. Raises ModelError,
        NumericsRefused, CapacityError or ConfigError.
        """
        self._run_seed = _checked_seed(run_seed)
        self._parts: EngineParts = build_parts(config or EngineConfig(), weights)
        self._unusable: str | None = None
        self._sequences: dict[SequenceKey, Sequence] = {}
        self._live: Counter[str] = Counter()
        self._launched: deque[LaunchedStep] = deque()
        self._steps = 0
        self._forward_tokens = 0
        self._output_tokens = 0
        self._last_step: StepReport | None = None

    @property
    def config(self) -> EngineConfig:
        """The configuration with every derived value filled in."""
        return self._parts.config

    @property
    def spec(self) -> ModelSpec:
        return self._parts.spec

    @property
    def parts(self) -> EngineParts:
        """The built parts, for manifests and proofs."""
        return self._parts

    def submit(self, request: Request) -> None:
        """Queue a request; raises RequestError, which concerns this request alone."""
        self._require_usable()
        request = self._checked(request)
        assert self.config.max_model_len is not None
        for sequence in sequences_of(
            request,
            run_seed=self._run_seed,
            max_model_len=self.config.max_model_len,
            eos_token_ids=self.spec.eos_token_ids,
        ):
            self._sequences[key_of(sequence)] = sequence
            self._parts.scheduler.add(sequence)
        self._live[str(request.id)] = request.params.n

    def has_unfinished(self) -> bool:
        """Whether a request waits or runs, or a launched step is not committed yet."""
        return bool(self._sequences) or bool(self._launched)

    def step(self) -> list[Completion]:
        """Launch one step, commit the step that is ``lag`` behind, return what finished.

        Raises NumericsRefused, and runs nothing, if the process's torch settings no longer keep
        the contract.
        """
        self._require_usable()
        if not self.has_unfinished():
            return []
        self._parts.runner.require_settings()
        self._unusable = "an exception ended a step halfway; build a new engine"
        finished = self._run_step()
        self._unusable = None
        basis = self._parts.runner.sampler.basis
        return [completion_of(sequence, basis) for sequence in finished]

    def _run_step(self) -> list[Sequence]:
        plan = self._parts.scheduler.schedule()
        if plan.rows:
            self._launched.append(self._parts.runner.launch(plan, self._sequences))
        elif not self._launched:
            raise RuntimeError("nothing can be scheduled and nothing is in flight")
        behind = self._parts.config.lag if plan.rows else 0
        assert behind is not None
        committed: Counter[SequenceKey] = Counter()
        finished: list[Sequence] = []
        while len(self._launched) > behind:
            self._commit(self._launched.popleft(), committed, finished)
        self._count(plan, committed)
        return finished

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Complete all requests; prompt-major, then by sample.

        A refused request raises RequestError before any runs. The engine must be idle.
        """
        self._require_usable()
        if self.has_unfinished():
            raise RuntimeError("generate needs an idle engine; submit and step drive a busy one")
        asked = self._all_checked(requests)
        for request in asked:
            self.submit(request)
        found: dict[SequenceKey, Completion] = {}
        while self.has_unfinished():
            found.update({(one.id, one.sample): one for one in self.step()})
        return [found[one.id, sample] for one in asked for sample in range(one.params.n)]

    def capacity(self) -> Capacity:
        """The KV pool: usable blocks, the tokens they hold, and the memory terms in bytes."""
        arena, config = self._parts.arena, self._parts.config
        kv_tokens = arena.num_blocks * arena.block_size
        assert config.max_model_len is not None
        return Capacity(
            kv_tokens=kv_tokens,
            kv_blocks=arena.num_blocks,
            max_concurrency_at_cap=kv_tokens / config.max_model_len,
            terms={"weights": self._parts.weight_bytes, "kv": arena.nbytes},
        )

    def stats(self) -> Stats:
        """Counters since the engine was built, and its present load."""
        scheduler = self._parts.scheduler
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free_blocks=scheduler.pool.num_free,
            cached_blocks=0,
            steps=self._steps,
            forward_tokens=self._forward_tokens,
            prefix_hit_tokens=0,
            preemptions=scheduler.num_preemptions,
            output_tokens=self._output_tokens,
        )

    def last_step(self) -> StepReport:
        """What the last call of :meth:`step` did; raises RuntimeError before the first."""
        if self._last_step is None:
            raise RuntimeError("no step has run yet")
        return self._last_step

    def manifest(self) -> Manifest:
        """What this engine is and did so far: configuration, contract, model, memory, counters."""
        builder = ManifestBuilder(command="engine", argv=(), target=None)
        fill_header(builder, os.environ)
        fill_from_engine(builder, self)
        builder.metrics = asdict(self.stats())
        return builder.close_complete()

    def close(self) -> None:
        """Drop unfinished requests; afterwards only what it did can be asked for."""
        if self._unusable is None:
            for sequence in list(self._sequences.values()):
                self._forget(sequence)
        self._launched.clear()
        self._sequences.clear()
        self._unusable = "it is closed"

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _require_usable(self) -> None:
        if self._unusable is not None:
            raise RuntimeError(f"this engine cannot run: {self._unusable}")

    def _commit(
        self, launched: LaunchedStep, committed: Counter[SequenceKey], finished: list[Sequence]
    ) -> None:
        """Give each sampled token to its sequence; what a stopped sequence overshot is dropped."""
        tokens = launched.wait()
        results = zip(tokens.token_ids, tokens.logprobs, tokens.faulty, strict=True)
        for row, sequence in zip(launched.plan.rows, launched.sequences, strict=True):
            for _ in row.sample_offsets:
                token, logprob, faulty = next(results)
                if sequence.is_finished:
                    continue
                if faulty:
                    sequence.fail(non_finite_failure(sequence))
                else:
                    sequence.commit(token, logprob)
                    committed[key_of(sequence)] += 1
            if sequence.is_finished and self._sequences.get(key_of(sequence)) is sequence:
                finished.append(sequence)
                self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self._parts.scheduler.finish(sequence)
        del self._sequences[key_of(sequence)]
        name = str(sequence.request.id)
        self._live[name] -= 1
        if self._live[name] == 0:
            del self._live[name]

    def _count(self, plan: StepPlan, committed: Counter[SequenceKey]) -> None:
        scheduler = self._parts.scheduler
        self._steps += bool(plan.rows)
        self._forward_tokens += plan.num_tokens
        self._output_tokens += committed.total()
        self._last_step = StepReport(
            step=plan.step,
            num_rows=len(plan.rows),
            num_tokens=plan.num_tokens,
            committed=tuple((id_, sample, count) for (id_, sample), count in committed.items()),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            used_blocks=scheduler.pool.num_used,
        )

    def _all_checked(self, requests: Iterable[Request]) -> list[Request]:
        """Every request checked, and that no id is used twice, before any is queued."""
        checked: dict[str, Request] = {}
        for request in requests:
            one = self._checked(request)
            if str(one.id) in checked:
                raise _duplicate_id(one.id)
            checked[str(one.id)] = one
        return list(checked.values())

    def _checked(self, request: Request) -> Request:
        """The request in normal form; raises RequestError with all its faults.

        Whatever passes also fits: max_model_len is never more than the pool holds.
        """
        limits = RequestLimits.of(self.spec, self.config.max_model_len)
        checked = check_request(request, limits)
        if str(checked.id) in self._live:
            raise _duplicate_id(checked.id)
        return checked


def _checked_seed(run_seed: int) -> int:
    seeds = Integer(minimum=0, maximum=MAX_SEED)
    try:
        return seeds.check(run_seed)
    except Broken as broken:
        raise ConfigError(
            f"run_seed {run_seed} {broken.problem}",
            where="argument run_seed",
            rule=broken.rule,
            remedy="give a seed in [0, 2^53)",
        ) from None


def _duplicate_id(request_id: RequestId) -> RequestError:
    fault = Fault(
        what=f"the id {request_id!r} is in use",
        where=f"request {request_id}, field id",
        rule='ids are unique among live requests, 5 and "5" being one: they name the stream',
        remedy="give each request its own id",
    )
    return RequestError.of_kind("duplicate_id", [fault])
