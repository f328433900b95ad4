"""What a case of the proof came to. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pagedctl.verify.comparison import Divergence


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """One case: how much was compared, what it exercised, what differed.

    ``rows`` counts steps by resident rows. ``counters`` are what the case is there to exercise.
    ``lacks`` says why equal answers prove nothing here, each as one sentence. A case that does
    not apply has ``not_run``, the reason, and nothing else.
    """

    name: str
    runs: int = 0
    requests: int = 0
    tokens: int = 0
    rows: Mapping[int, int] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    divergences: tuple[Divergence, ...] = ()
    lacks: tuple[str, ...] = ()
    not_run: str | None = None
    is_reference: bool = False
    wall_s: float = 0.0

    @property
    def num_differing(self) -> int:
        """Requests that differ in some run."""
        return len({str(one.request_id) for one in self.divergences})

    @property
    def holds(self) -> bool | None:
        """None: no answer."""
        if self.divergences:
            return False
        return None if self.lacks or self.not_run else True

    @property
    def rows_p50(self) -> int:
        """Resident rows of the middle step; 0 without steps."""
        steps = Counter(self.rows)
        return sorted(steps.elements())[steps.total() // 2] if steps else 0

    @property
    def rows_max(self) -> int:
        return max(self.rows, default=0)

    def text(self) -> str:
        """``equal (212 preemptions)``, ``3 of 64 requests differ``, ``no verdict``, ..."""
        if self.not_run is not None:
            return f"not run: {self.not_run}"
        if self.is_reference:
            return "reference"
        if self.divergences:
            return f"{self.num_differing:,} of {self.requests:,} requests differ"
        counted = ", ".join(f"{count:,} {name}" for name, count in self.counters.items())
        standing = "no verdict" if self.lacks else "equal"
        return f"{standing} ({counted})" if counted else standing

    def to_json_object(self) -> dict[str, object]:
        """What the manifest says of it."""
        return {
            "case": self.name,
            "holds": self.holds,
            "not_run": self.not_run,
            "runs": self.runs,
            "requests": self.requests,
            "requests_differing": self.num_differing,
            "tokens": self.tokens,
            "resident_rows": {str(rows): steps for rows, steps in self.rows.items()},
            "resident_rows_p50": self.rows_p50,
            "resident_rows_max": self.rows_max,
            "counters": {name.replace(" ", "_"): count for name, count in self.counters.items()},
            "lacks": list(self.lacks),
            "wall_s": round(self.wall_s, 3),
        }
