"""The engine: requests in, completions out. Owns the loop and nothing else."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from collections.abc import Sequence as Series
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from types import TracebackType

import torch

from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.availability import Availability
from pagedctl.engine.build import EngineParts, build_parts
from pagedctl.engine.commit import commit_step
from pagedctl.engine.completions import completion_of, sequences_of
from pagedctl.engine.engine_checks import (
    PauseMode,
    checked_mode,
    checked_samples,
    duplicate_id,
    no_processed_scores,
    request_limits,
    sampling_context,
)
from pagedctl.engine.fault_location import FaultLocation, locate_fault
from pagedctl.engine.live_requests import LiveRequests
from pagedctl.engine.manifest_sections import fill_from_engine, fill_header
from pagedctl.engine.out_of_memory import refused_if_out_of_memory
from pagedctl.engine.request import (
    Capacity,
    Completion,
    Request,
    RequestId,
    ScoreRequest,
    Scores,
    Stats,
)
from pagedctl.engine.request_check import check_request
from pagedctl.engine.runner import LaunchedStep
from pagedctl.engine.scheduler import SequenceKey, key_of
from pagedctl.engine.scoring import (
    check_score_request,
    score_requests,
    score_sequence,
    scores_of,
)
from pagedctl.engine.sequence import Sequence
from pagedctl.engine.step_counts import StepCounts
from pagedctl.engine.step_report import StepReport
from pagedctl.manifest.schema import Manifest
from pagedctl.manifest.writer import ManifestBuilder
from pagedctl.models.spec import ModelSpec
from pagedctl_kernels.registry import Registry


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
        registry: Registry | None = None,
        sharing: Engine | None = None,
        needs_record: bool = True,
    ) -> None:
        """Build from *config*; *weights* (by Hugging Face name) stand in for files.

        ``run_seed`` seeds the requests that have no seed of their own. ``registry`` holds the
        leaves to choose from (None: the house's and those of plug-ins). ``sharing`` lends its
        loaded model, which must be of the same options of model and contract, of the same
        kv_dtype and block_size; only batching and the pool may be other. A bitwise contract that
        *config* asks for by another value than the default is refused without a shipped profile
        or a verification record, unless ``unverified``; ``needs_record=False`` is for what only
        measures or proves. Raises ModelError, NumericsRefused, CapacityError or ConfigError.
        """
        self._parts: EngineParts = build_parts(
            config or EngineConfig(),
            weights,
            registry=registry,
            shared=None if sharing is None else sharing.parts.model,
            needs_record=needs_record,
        )
        self._context = sampling_context(self._parts, run_seed)
        self._limits = request_limits(self._parts)
        self._availability = Availability()
        self._counts = StepCounts(self._parts.scheduler)
        self._live = LiveRequests(self._parts.scheduler)
        self._ended: list[Sequence] = []
        self._launched: deque[LaunchedStep] = deque()

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

    # -- requests ------------------------------------------------------------------------------

    def submit(self, request: Request, *, samples: Series[int] | None = None) -> None:
        """Queue a request; raises RequestError, which concerns this request alone.

        *samples* are the sample numbers that are wanted (None: all n of them), each with the
        stream that it has among all. While the engine is paused, the request is held back.
        """
        self._availability.require_free()
        request = self._checked(request)
        self._queue(request, checked_samples(request, samples))

    def has_unfinished(self) -> bool:
        """Whether a request is not answered yet, or a launched step is not committed yet."""
        return bool(self._live or self._launched or self._ended)

    def step(self) -> list[Completion]:
        """Launch one step, commit the step that is ``lag`` behind, return what finished.

        A paused engine launches nothing: it returns what ended before, then []. Raises
        NumericsRefused, and runs nothing, if the process's torch settings no longer keep the
        contract; CapacityError if memory for the step cannot be had.
        """
        self._availability.require_free()
        self._run_if_it_may()
        finished = [completion_of(sequence, self._context) for sequence in self._ended]
        self._ended = []  # only now: an interruption above loses nobody
        return finished

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Complete all requests; prompt-major, then by sample.

        A refused request raises RequestError before any runs. The engine must be idle.
        """
        self._require_idle("generate", "submit and step drive a busy one")
        asked = self._all_checked(requests)
        for request in asked:
            self._queue(request, range(request.params.n))
        found: dict[SequenceKey, Completion] = {}
        while self.has_unfinished():
            found.update({(one.id, one.sample): one for one in self.step()})
        return [found[one.id, sample] for one in asked for sample in range(one.params.n)]

    # -- scores --------------------------------------------------------------------------------

    def score(
        self,
        sequences: Series[Series[int]],
        *,
        start: int | Series[int] = 1,
        temperature: float = 1.0,
    ) -> list[Scores]:
        """The logprobs of given sequences from *start* on, in their order.

        ``result[i].logprobs`` float32[T - start] are of ``sequences[i][start:]``, each token
        given all before it, in the engine's basis at *temperature*: bitwise what generation
        reported for the same tokens, under a bitwise contract. Raises RequestError before
        anything runs; a sequence that fails mid-run comes back with ``error``.
        """
        asked = [self.check_score(one) for one in score_requests(sequences, start, temperature)]
        found = {one.id: one for one in self.scores(asked)}
        return [found[place] for place in range(len(asked))]

    def check_score(self, request: ScoreRequest) -> ScoreRequest:
        """The request in normal form; raises RequestError with all its faults."""
        if self._context.logprob_basis == "processed":
            raise no_processed_scores()
        return check_score_request(request, self._limits)

    def scores(self, requests: Iterable[ScoreRequest]) -> Generator[Scores]:
        """Score requests as they come, each result as it finishes, in any order.

        Reads ahead as many as two full batches. The engine must be idle, and is busy until the
        iterator ends or is closed. Raises RequestError for a request that breaks a rule.
        """
        self._require_idle("scores", "let it finish its requests first")
        self._availability.scoring = True
        try:
            yield from self._run_scores(iter(requests))
        finally:
            self._availability.scoring = False
            if self._availability.unusable is None:
                self._cancel(self._live.sequences.values())
                self._launched.clear()
                self._ended.clear()

    def _run_scores(self, requests: Iterator[ScoreRequest]) -> Generator[Scores]:
        asked: dict[int, ScoreRequest] = {}
        most = 2 * self.config.max_num_seqs
        number = 0
        while True:
            for request in islice(requests, most - len(asked)):
                request = self.check_score(request)
                sequence = score_sequence(request, number, self._context)
                if sequence.is_scored:
                    yield scores_of(request, sequence, self._context)
                    continue
                asked[number] = request
                self._live.add(sequence, hold=False)
                number += 1
            if not asked:
                return
            for sequence in self._advance():
                request = asked.pop(int(sequence.request.id))
                yield scores_of(request, sequence, self._context)

    # -- control -------------------------------------------------------------------------------

    def cancel(self, id: RequestId | None = None) -> int:
        """Cancel a request, None: all; how many requests that ended.

        Each unfinished sample comes from the next step with finish_reason "abort" and the
        tokens that were committed. 0 for a request that is finished, unknown, or cancelled.
        """
        self._availability.require_free()
        chosen = self._live.ids() if id is None else [id] if id in self._live else []
        for one in chosen:
            self._cancel(self._live.of(one))
        return len(chosen)

    def pause(self, mode: PauseMode) -> None:
        """Stop sampling until :meth:`resume`; requests submitted meanwhile are held back.

        ``abort``: cancel all. ``wait``: steps go on until what was submitted before has
        finished. ``keep``: freeze; running requests keep their keys and values. What is held
        back or frozen counts as unfinished, though steps return nothing then.
        """
        self._availability.require_free()
        self._availability.paused = checked_mode(mode)
        if mode == "abort":
            self.cancel()
        if mode != "wait":
            self._drain()

    def resume(self) -> None:
        """Undo :meth:`pause`; requests that were held back follow those from before."""
        self._availability.paused = None
        self._live.release_held()

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix; how many blocks that were, those in use included."""
        return self._parts.scheduler.pool.unlink_all()

    def locate_fault(self, token_ids: Series[int]) -> FaultLocation | None:
        """Where a sequence that failed as ``non_finite`` first leaves the finite numbers.

        Computes *token_ids* (prompt and output) once more, aside from what is being served;
        None if every value is finite. Raises CapacityError if memory for it cannot be had.
        """
        self._availability.require_usable()
        assert self.config.chunk_size is not None
        with refused_if_out_of_memory(
            f"memory for a rerun of {len(token_ids)} tokens cannot be had",
            where="the keys and values of a failed sequence",
            rule="it is computed in a cache of its own, beside the pool",
            remedy="locate it on a machine with more memory, or with a smaller pool",
        ):
            return locate_fault(
                self._parts.runner.decoder,
                token_ids,
                block_size=self.config.block_size,
                kv_dtype=self.config.kv_dtype,
                chunk_size=self.config.chunk_size,
            )

    # -- facts ---------------------------------------------------------------------------------

    def capacity(self) -> Capacity:
        """The KV pool: usable blocks, the tokens they hold, and the memory terms in bytes."""
        arena = self._parts.arena
        kv_tokens = arena.num_blocks * arena.block_size
        return Capacity(
            kv_tokens=kv_tokens,
            kv_blocks=arena.num_blocks,
            max_concurrency_at_cap=kv_tokens / self._context.max_model_len,
            terms={"weights": self._parts.model.weight_bytes, "kv": arena.nbytes},
        )

    def stats(self) -> Stats:
        """Counters since the engine was built, and its present load."""
        return self._counts.stats(num_held=self._live.num_held)

    def last_step(self) -> StepReport:
        """What the last call of :meth:`step` did; raises RuntimeError before the first."""
        return self._counts.last()

    def manifest(self) -> Manifest:
        """What this engine is and did so far: configuration, contract, model, memory, counters."""
        builder = ManifestBuilder(command="engine", argv=(), target=None)
        fill_header(builder, os.environ)
        fill_from_engine(builder, self)
        builder.metrics = asdict(self.stats())
        return builder.close_complete()

    def close(self) -> None:
        """Drop unfinished requests; afterwards only what it did can be asked for."""
        if self._availability.unusable is None:
            for sequence in list(self._live.sequences.values()):
                self._live.forget(sequence)
        self._live = LiveRequests(self._parts.scheduler)
        self._launched.clear()
        self._ended.clear()
        self._availability.unusable = "it is closed"

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- the loop ------------------------------------------------------------------------------

    def _advance(self) -> list[Sequence]:
        """Run one step if there is something to run; what ended since the last call."""
        self._run_if_it_may()
        ended, self._ended = self._ended, []
        return ended

    def _run_if_it_may(self) -> None:
        self._availability.require_usable()
        if self._may_run():
            self._parts.runner.require_settings()
            with self._unusable_if_cut_short():
                self._run_step()

    @contextmanager
    def _unusable_if_cut_short(self) -> Iterator[None]:
        """An exception in the block leaves books that nothing may go on with."""
        with (
            self._availability.lost_if_cut_short(),
            refused_if_out_of_memory(
                "memory for a step cannot be had",
                where="option max_num_batched_tokens",
                rule=f"a step computes up to {self.config.max_num_batched_tokens} tokens at once",
                remedy="lower --max-num-batched-tokens or --max-num-seqs, or the pool",
            ),
        ):
            yield

    def _may_run(self) -> bool:
        work = self._parts.scheduler.has_unfinished() or bool(self._launched)
        return work and self._availability.may_launch

    def _run_step(self) -> None:
        plan = self._parts.scheduler.schedule()
        if plan.rows:
            self._launched.append(self._parts.runner.launch(plan, self._live.sequences))
        elif not self._launched:
            raise RuntimeError("nothing can be scheduled and nothing is in flight")
        assert self.config.lag is not None
        self._counts.step(plan, self._commit(self.config.lag if plan.rows else 0))

    def _commit(self, behind: int) -> Counter[SequenceKey]:
        """Commit launched steps but the last *behind*; the output tokens of each sequence."""
        committed: Counter[SequenceKey] = Counter()
        while len(self._launched) > behind:
            for row in commit_step(self._launched.popleft(), self._parts.scheduler):
                committed[key_of(row.sequence)] += row.num_tokens
                if row.sequence.is_finished:
                    self._end(row.sequence)
        self._counts.commit(committed)
        return +committed

    def _drain(self) -> None:
        """Commit all that was launched, so that nothing is in flight."""
        with self._unusable_if_cut_short():
            self._commit(0)

    def _cancel(self, sequences: Iterable[Sequence]) -> None:
        for sequence in list(sequences):
            sequence.abort()
            self._end(sequence)

    def _queue(self, request: Request, samples: Iterable[int]) -> None:
        for sequence in sequences_of(request, self._context, samples):
            self._live.add(sequence, hold=self._availability.paused is not None)

    def _end(self, sequence: Sequence) -> None:
        self._live.forget(sequence)
        self._ended.append(sequence)

    # -- checks --------------------------------------------------------------------------------

    def _require_idle(self, what: str, remedy: str) -> None:
        self._availability.require_idle(what, remedy, busy=self.has_unfinished())

    def _all_checked(self, requests: Iterable[Request]) -> list[Request]:
        """Every request checked, and that no id is used twice, before any is queued."""
        checked: dict[str, Request] = {}
        for request in requests:
            one = self._checked(request)
            if str(one.id) in checked:
                raise duplicate_id(one.id)
            checked[str(one.id)] = one
        return list(checked.values())

    def _checked(self, request: Request) -> Request:
        """The request in normal form; raises RequestError with all its faults.

        Whatever passes also fits: max_model_len is never more than the pool holds.
        """
        checked = check_request(request, self._limits)
        if checked.id in self._live:
            raise duplicate_id(checked.id)
        return checked
