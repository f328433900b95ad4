"""What a proof of invariance came to: the verdict, and what the manifest says of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass

from pagedctl.manifest.schema import Verdict
from pagedctl.verify.case_result import CaseResult
from pagedctl.verify.cases import ABSENT
from pagedctl.verify.comparison import Divergence
from pagedctl.verify.power_check import FaultResult, Measured
from pagedctl.verify.selection_points import SelectionPoint
from pagedctl.verify.suspects import Located


@dataclass(frozen=True, kw_only=True)
class InvarianceResult:
    """Every case, the planted faults, how often ``fast`` differs, and the selection points.

    ``still_needed`` are the other commands whose records the contract takes and that nobody has
    earned. ``is_whole``: no option left a case out. ``fast`` is None where it could not
    run, ``located`` where nothing differs or nobody looked.
    """

    contract: str
    still_needed: tuple[str, ...]
    cases: tuple[CaseResult, ...]
    is_whole: bool
    faults: tuple[FaultResult, ...]
    fast: Measured | None
    points: tuple[SelectionPoint, ...]
    located: Located | None
    wall_s: float

    @property
    def first(self) -> Divergence | None:
        """The first divergence, in the order of the cases."""
        return next((one for case in self.cases for one in case.divergences), None)

    @property
    def requests_differing(self) -> int:
        """Requests that differ in some run of some case."""
        return len({str(one.request_id) for case in self.cases for one in case.divergences})

    @property
    def faults_caught(self) -> int:
        return sum(one.caught for one in self.faults)

    @property
    def proved(self) -> tuple[str, ...]:
        """The cases that hold."""
        return tuple(one.name for one in self.cases if one.holds and not one.is_reference)

    @property
    def left_out(self) -> tuple[str, ...]:
        """The cases that this run's options left out, with the reason; a record needs them."""
        absent = (one for one in self.cases if one.not_run is not None)
        return tuple(f"{one.name}: {one.not_run}" for one in absent if one.name not in ABSENT)

    def lacks(self) -> tuple[str, ...]:
        """Why there is no verdict, each as one sentence; empty if there is one."""
        told = [f"case {one.name}: {text}" for one in self.cases for text in one.lacks]
        told += [
            f"planted fault {one.name}, {one.description}: {one.sentence()}"
            for one in self.faults
            if not one.caught
        ]
        return (*told, *self.idle)

    @property
    def idle(self) -> tuple[str, ...]:
        """That no chosen case applies, in one sentence, or nothing."""
        if any(one.runs or one.lacks for one in self.cases if not one.is_reference):
            return ()
        return ("nothing was compared: no chosen case applies here",)

    @property
    def verdict(self) -> Verdict:
        """A divergence is a no; without one, power decides whether there is an answer."""
        if self.requests_differing:
            cases = ", ".join(one.name for one in self.cases if one.divergences)
            number = self.requests_differing
            what = "1 request differs" if number == 1 else f"{number:,} requests differ"
            text = f"NOT BATCH-INVARIANT under {self.contract}: {what} ({cases})"
            return Verdict(holds=False, text=text)
        if self.lacks():
            return Verdict(holds=None, text=f"NO VERDICT under {self.contract}")
        if not self.is_whole or any(one.standing == "open" for one in self.points):
            cases = ", ".join(self.proved)
            return Verdict(holds=True, text=f"equal under {self.contract} in {cases}")
        needed = " and ".join(self.still_needed)
        note = f" ({needed} not recorded)" if needed else ""
        return Verdict(holds=True, text=f"BATCH-INVARIANT under {self.contract}{note}")

    def metrics(self) -> dict[str, object]:
        """The manifest's metrics; ``resident_rows`` counts steps of all compared runs."""
        rows: Counter[int] = Counter()
        for one in self.cases:
            if not one.is_reference:
                rows.update(one.rows)
        first = self.first
        return {
            "wall_s": round(self.wall_s, 3),
            "requests_differing": self.requests_differing,
            "runs": sum(one.runs for one in self.cases),
            "resident_rows": {str(number): steps for number, steps in sorted(rows.items())},
            "planted_faults_caught": self.faults_caught,
            "planted_faults": [one.to_json_object() for one in self.faults],
            "fast_differs": None if self.fast is None else asdict(self.fast),
            "cases": [one.to_json_object() for one in self.cases],
            "first_divergence": None if first is None else first.to_json_object(),
            "suspect": None if self.located is None else self.located.to_json_object(),
            "lacks": list(self.lacks()),
            "selection_points": [asdict(one) for one in self.points],
        }
