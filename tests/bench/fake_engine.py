"""An engine that computes nothing: every running sample gets one token per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pagedctl.engine.request import Capacity, Completion, Request, RequestFailure, Stats
from pagedctl.engine.step_report import StepReport

FAILURE = RequestFailure(kind="non_finite", what="w", where="x", rule="r", remedy="m")


@dataclass
class Clock:
    """A clock that stands still unless it is pushed; seconds."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class FakeEngine:
    """Serves at most ``max_num_seqs`` samples at once, first come first served.

    Each step pushes ``clock`` by the next of ``step_s``, repeated without end. ``stops`` ends
    a request's samples after so many tokens; ``fails`` names requests that fail at once.
    """

    clock: Clock
    step_s: tuple[float, ...] = (0.5,)
    max_num_seqs: int = 8
    stops: Mapping[object, int] = field(default_factory=dict)
    fails: frozenset[object] = frozenset()
    cached_blocks: int = 0
    waiting: list[tuple[Request, int]] = field(default_factory=list)
    running: dict[tuple[object, int], list[object]] = field(default_factory=dict)
    steps: int = 0
    forward_tokens: int = 0
    report: StepReport | None = None

    def submit(self, request: Request) -> None:
        self.waiting += [(request, sample) for sample in range(request.params.n)]

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[Completion]:
        self.clock.now_s += self.step_s[self.steps % len(self.step_s)]
        self.steps += 1
        while self.waiting and len(self.running) < self.max_num_seqs:
            request, sample = self.waiting.pop(0)
            self.running[request.id, sample] = [request, 0]
        committed = []
        finished = []
        for key, entry in list(self.running.items()):
            request, count = entry
            if key[0] in self.fails:
                finished.append(self._completion(request, key[1], count, failed=True))
                del self.running[key]
                continue
            entry[1] = count + 1
            self.forward_tokens += 1
            committed.append((*key, 1))
            if entry[1] in (request.params.max_tokens, self.stops.get(request.id)):
                finished.append(self._completion(request, key[1], entry[1]))
                del self.running[key]
        self.report = StepReport(
            step=self.steps,
            num_rows=len(committed),
            num_tokens=len(committed),
            num_sampled=len(committed),
            committed=tuple(committed),
            running=len(self.running),
            waiting=len(self.waiting),
            used_blocks=2 * len(self.running),
        )
        return finished

    def last_step(self) -> StepReport:
        assert self.report is not None
        return self.report

    def stats(self) -> Stats:
        return Stats(
            running=len(self.running),
            waiting=len(self.waiting),
            free_blocks=0,
            cached_blocks=self.cached_blocks,
            steps=self.steps,
            forward_tokens=self.forward_tokens,
            prefix_hit_tokens=0,
            preemptions=self.steps,
            output_tokens=self.forward_tokens,
        )

    def capacity(self) -> Capacity:
        return Capacity(kv_tokens=640, kv_blocks=40, max_concurrency_at_cap=2.5, terms={})

    def reset_prefix_cache(self) -> int:
        dropped, self.cached_blocks = self.cached_blocks, 0
        return dropped

    def _completion(
        self, request: Request, sample: int, count: int, *, failed: bool = False
    ) -> Completion:
        stopped = count == self.stops.get(request.id)
        return Completion(
            id=request.id,
            sample=sample,
            group=request.id,
            prompt_token_ids=np.array(request.prompt_token_ids, dtype=np.int32),
            token_ids=np.zeros(count, dtype=np.int32),
            logprobs=np.zeros(count, dtype=np.float32),
            logprob_basis="scaled",
            text=None,
            finish_reason=None if failed else "stop" if stopped else "length",
            stop_reason=None,
            temperature=1.0,
            seed=0,
            weight_version_first=0,
            weight_version_last=0,
            cached_tokens=0,
            preemptions=0,
            error=FAILURE if failed else None,
        )
