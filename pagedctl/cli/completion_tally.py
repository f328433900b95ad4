"""What a run of completions amounts to: counts, the manifest's metrics, and the last line."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median_high

from pagedctl.bench.metrics import FINISH_REASONS, LATENCIES
from pagedctl.cli.words import count_of
from pagedctl.engine.completed_lines import CompletedLines, OpenRequest
from pagedctl.engine.request import Capacity, Completion, RequestFailure, RequestId, Stats
from pagedctl.errors import Fault, RequestError


class Tally:
    """Counts requests as they are asked, refused, completed and failed.

    A request is completed when all its samples finished without an error. ``wall_s`` is the
    time in the engine, without reading, tokenising and writing.

    All counts and rates are of this run, which may be one part of several: of what earlier
    parts wrote, the *kept* lines, only their number counts, and how many of them are errors. A
    request is completed in the part that finishes its last sample.
    """

    def __init__(self, kept: CompletedLines | None = None) -> None:
        self._kept = CompletedLines() if kept is None else kept
        self.num_requests = 0
        self.num_samples = 0
        self.num_refused = 0
        self.num_finished = 0
        self.output_tokens = 0
        self.wall_s = 0.0
        self._prompt_tokens: dict[RequestId, int] = {}
        self._unfinished: Counter[RequestId] = Counter()
        self._samples_each: set[int] = set()
        self._reasons: Counter[str] = Counter()
        self._lengths: list[int] = []
        self._failed: dict[RequestId, RequestFailure] = {}
        self._late: list[Fault] = []

    @contextmanager
    def engine_time(self) -> Iterator[None]:
        """Count the block's time into ``wall_s``."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self.wall_s += time.perf_counter() - started_s

    def ask(self, one: OpenRequest) -> None:
        """A request that the engine took, or those of its samples that are open."""
        count, request = len(one.samples), one.request
        self.num_requests += 1
        self.num_samples += count
        self._samples_each.add(count)
        self._prompt_tokens[request.id] = len(request.prompt_token_ids)
        self._unfinished[request.id] = count

    def refuse(self, error: RequestError | None = None) -> None:
        """A request without an answer; *error* where it was refused by the engine itself."""
        self.num_refused += 1
        self._late += error.faults if error is not None else ()

    def finish(self, completion: Completion) -> None:
        """One sample, complete or failed."""
        length = len(completion.token_ids)
        self.num_finished += 1
        self._unfinished[completion.id] -= 1
        self.output_tokens += length
        self._lengths.append(length)
        if completion.finish_reason is not None:
            self._reasons[completion.finish_reason] += 1
        if completion.error is not None:
            self._failed.setdefault(completion.id, completion.error)

    @property
    def num_failed(self) -> int:
        """Requests of which a sample failed mid-run."""
        return len(self._failed)

    @property
    def has_errors(self) -> bool:
        """Whether a line of the whole output, earlier parts included, is no whole answer."""
        return bool(self.num_refused or self._failed or self._kept.num_errors)

    def problems(self) -> RequestError | None:
        """What the engine refused and what failed mid-run, as one error; None if nothing."""
        faults = [*self._late, *(failure.fault for failure in self._failed.values())]
        return RequestError.of_kind("bad_field", faults) if faults else None

    def metrics(
        self, stats: Stats | None, capacity: Capacity | None, *, end_to_end_s: float
    ) -> dict[str, object]:
        """The manifest's ``metrics``, with the keys of a bench; None is what was not measured.

        *end_to_end_s* has reading, tokenising and writing in it. *stats* None: no engine.
        ``prompt_tokens`` are those of completed requests. In a run that was cut short,
        ``output_tokens`` also has those of unfinished samples, which the output has not.
        ``lines_kept`` are the lines of earlier parts, ``error_lines_kept`` those of them that
        are refusals or failures; nothing else counts them.
        """
        wall_s = self.wall_s
        completed = self._completed()
        prompt_tokens = sum(self._prompt_tokens[one] for one in completed)
        unfinished = self._unfinished_tokens(stats)
        output_tokens = self.output_tokens + unfinished
        total_tokens = None if +self._unfinished else prompt_tokens + output_tokens
        return {
            "wall_s": wall_s,
            "requests_completed": len(completed),
            "requests_failed": self.num_failed,
            "requests_refused": self.num_refused,
            "lines_kept": self._kept.num_lines,
            "error_lines_kept": self._kept.num_errors,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "output_tokens_unfinished": unfinished,
            "output_tokens_per_s": _rate(output_tokens, wall_s),
            "total_tokens_per_s": _rate(total_tokens, wall_s),
            "tokens_per_s_end_to_end": _rate(output_tokens, end_to_end_s if wall_s else 0.0),
            "requests_per_s": _rate(len(completed), wall_s),
            **dict.fromkeys(LATENCIES),
            "kv_tokens": capacity.kv_tokens if capacity else None,
            "max_concurrency_at_cap": capacity.max_concurrency_at_cap if capacity else None,
            "peak_device_mib": None,
            "finish_reasons": self._reason_counts(),
            "len_p50": median_high(self._lengths) if self._lengths else None,
            "len_max": max(self._lengths, default=None),
            "preemptions": stats.preemptions if stats else None,
            "forward_tokens": stats.forward_tokens if stats else None,
            "prefix_hit_tokens": stats.prefix_hit_tokens if stats else None,
        }

    def summary(self, stats: Stats | None) -> str:
        """The run in one line."""
        tokens = self.output_tokens + self._unfinished_tokens(stats)
        rate = _rate(tokens, self.wall_s) or 0.0
        reasons = " ".join(f"{name} {count}" for name, count in self._reason_counts().items())
        parts = [
            f"{count_of(self.num_requests, 'request')} x {self._samples_text()}",
            count_of(tokens, "token"),
            f"{self.wall_s:,.1f} s",
            f"{rate:,.0f} output tokens/s",
            reasons,
            f"prefix hits {stats.prefix_hit_tokens if stats else 0:,}",
            f"preemptions {stats.preemptions if stats else 0:,}",
        ]
        if self.num_failed:
            parts.append(f"failed {self.num_failed:,}")
        if self.num_refused:
            parts.append(f"refused {self.num_refused:,}")
        if self._kept.num_lines:
            parts.append(f"kept {self._kept_text()}")
        return " · ".join(parts)

    def _completed(self) -> list[RequestId]:
        """The requests whose samples all finished, none with an error."""
        failed = self._kept.failed.union(self._failed)
        return [one for one, left in self._unfinished.items() if left <= 0 and one not in failed]

    def _unfinished_tokens(self, stats: Stats | None) -> int:
        """Tokens that the engine sampled for what has not finished."""
        return stats.output_tokens - self.output_tokens if stats and +self._unfinished else 0

    def _reason_counts(self) -> Mapping[str, int]:
        return {name: self._reasons[name] for name in FINISH_REASONS}

    def _kept_text(self) -> str:
        lines = count_of(self._kept.num_lines, "line")
        errors = self._kept.num_errors
        return f"{lines}, {count_of(errors, 'error')} among them" if errors else lines

    def _samples_text(self) -> str:
        least, most = min(self._samples_each, default=1), max(self._samples_each, default=1)
        return str(least) if least == most else f"{least}..{most}"


def _rate(count: int | None, seconds: float) -> float | None:
    return count / seconds if count is not None and seconds > 0 else None
