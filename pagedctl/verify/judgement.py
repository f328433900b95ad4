"""From the traces of a case to its result: what differs, and what was not exercised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from pagedctl.config.engine_config import EngineConfig
from pagedctl.verify.case_legs import MOST_ROWS
from pagedctl.verify.case_result import CaseResult
from pagedctl.verify.cases import Case
from pagedctl.verify.comparison import Divergence, first_difference
from pagedctl.verify.legs import Leg, LegTrace
from pagedctl.verify.reference import Reference

UNMET = {
    "chunk_splits": "no prompt was split; give longer prompts",
    "preemptions": "no request was preempted; give more --max-tokens, --requests or longer prompts",
    "prefix_hit_tokens": "no prefix was found; give a larger --kv-cache-memory-bytes",
    "overshoots": "no row was computed behind a stop; give a larger --max-tokens",
}
"""A counter that is 0: what that means, and the remedy."""


class CaseJudge:
    """Takes the runs of one case as they end."""

    def __init__(self, case: Case, config: EngineConfig, reference: Reference) -> None:
        self._case = case
        self._config = config
        self._reference = reference
        self._divergences: list[Divergence] = []
        self._lacks: list[str] = []
        self._short: list[str] = []
        self._rows: Counter[int] = Counter()
        self._counted: Counter[str] = Counter()
        self._requests: set[str] = set()
        self._runs = 0
        self._tokens = 0

    def add(self, leg: Leg, trace: LegTrace) -> None:
        """Compare a run with the reference, and look at what it exercised."""
        if not leg.probes:
            return
        self._runs += 1
        self._rows.update(trace.rows)
        for words, name in self._case.counters.items():
            self._counted[words] += trace.counter(name)
        self._divergences += divergences(self._case.name, leg, trace, self._reference)
        self._lacks += (f"{leg.name}: {text}" for text in _unmet(leg, trace))
        if leg.rows is not None and trace.most_rows < leg.rows:
            few = f"{leg.name}: at most {trace.most_rows} of {leg.rows} rows were resident"
            self._short.append(f"{few}; {_more_rows(self._config)}")
        self._requests.update(str(probe.of.id) for probe in leg.probes)
        self._tokens += sum(len(answer.token_ids) for answer in trace.answers.values())

    def result(self, wall_s: float) -> CaseResult:
        """What the case came to."""
        return CaseResult(
            name=self._case.name,
            runs=self._runs,
            requests=len(self._requests),
            tokens=self._tokens,
            rows=dict(sorted(self._rows.items())),
            counters={words: self._counted[words] for words in self._case.counters},
            divergences=tuple(self._divergences),
            lacks=self._all_lacks(),
            wall_s=wall_s,
        )

    def _all_lacks(self) -> tuple[str, ...]:
        """Where there are too few rows for the case, those of its runs are not told as well."""
        if self._runs == 0:
            return ("nothing was compared; give a larger --max-tokens",)
        most = max(self._rows, default=0)
        few = tuple(few_rows(self._case, most, self._config))
        return (*few, *self._not_exercised(), *self._lacks, *(() if few else self._short))

    def _not_exercised(self) -> Iterator[str]:
        for words, name in self._case.counters.items():
            if self._counted[words] == 0:
                yield UNMET[name]


def few_rows(case: Case, most: int, config: EngineConfig) -> Iterator[str]:
    """What is said where at most *most* rows were resident in *case*, if that is too few."""
    if most < case.least_rows:
        few = f"at most {most} rows were resident, fewer than {case.least_rows}"
        yield f"{few if most > 1 else 'no batches formed'}; {_more_rows(config)}"


def _unmet(leg: Leg, trace: LegTrace) -> Iterator[str]:
    """What a run was there for and did not do."""
    for name in leg.needs:
        if trace.counter(name) == 0:
            yield UNMET[name]
    for probe in leg.probes:
        found = trace.cached_tokens.get((probe.request.id, 0))
        if probe.cached_tokens not in (None, found):
            yield (
                f"{found} of {probe.cached_tokens} tokens of request {probe.request.id} were "
                "found in the prefix cache; give a larger --kv-cache-memory-bytes"
            )


def divergences(case: str, leg: Leg, trace: LegTrace, reference: Reference) -> Iterable[Divergence]:
    """Where the answers of a run first depart from what each request gives alone."""
    for probe in leg.probes:
        for sample in range(probe.request.params.n):
            found = trace.answers[probe.request.id, sample]
            difference = first_difference(reference.expected(probe, sample), found)
            if difference is not None:
                yield Divergence(
                    case=case,
                    run=leg.name,
                    request_id=probe.of.id,
                    asked_id=probe.request.id,
                    sample=sample,
                    difference=difference,
                )


def _more_rows(config: EngineConfig) -> str:
    """What would let more rows be resident."""
    if config.max_num_seqs < MOST_ROWS:
        return f"give --max-num-seqs {MOST_ROWS} or more"
    if config.max_num_batched_tokens < MOST_ROWS:
        return f"give --max-num-batched-tokens {MOST_ROWS} or more"
    return "give a larger --kv-cache-memory-bytes, --max-num-batched-tokens or --max-tokens"
