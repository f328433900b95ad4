"""The JUnit file: valid, one test case per case of the proof, each with its reason."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np

from pagedctl.verify.case_result import CaseResult
from pagedctl.verify.comparison import Difference, Divergence
from pagedctl.verify.invariance_result import InvarianceResult
from pagedctl.verify.junit import junit_xml
from pagedctl.verify.localisation import Suspect
from pagedctl.verify.power_check import FaultResult, Measured
from pagedctl.verify.suspects import Located

CAUGHT = FaultResult(
    name="split",
    description="follows the rows",
    measured=Measured(requests=6, requests_differing=5, requests_differing_in_tokens=0),
)
MISSED = replace(
    CAUGHT, measured=Measured(requests=6, requests_differing=0, requests_differing_in_tokens=0)
)
UNTRIED = replace(CAUGHT, measured=None, reason="no memory")


def divergence(request_id: int | str = "q\x00<&>") -> Divergence:
    difference = Difference(
        kind="logprob", position=9, expected=np.float32(-1), found=np.float32(np.nan), ulps=3
    )
    return Divergence(
        case="packed",
        run="9 rows",
        request_id=request_id,
        asked_id=request_id,
        sample=0,
        difference=difference,
    )


def result(*cases: CaseResult, **changes: object) -> InvarianceResult:
    values: dict[str, object] = {
        "contract": "invariant",
        "still_needed": (),
        "cases": (CaseResult(name="alone", runs=1, is_reference=True), *cases),
        "is_whole": True,
        "faults": (CAUGHT,),
        "fast": None,
        "points": (),
        "located": None,
        "wall_s": 12.5,
        **changes,
    }
    return InvarianceResult(**values)  # type: ignore[arg-type]


PACKED = CaseResult(name="packed", runs=2, requests=3, tokens=24, rows={64: 9}, wall_s=1.25)
BROKEN = replace(PACKED, divergences=(divergence(), divergence(4)))
GRAPHS = CaseResult(name="graphs", not_run="the CPU has no graphs")
WEAK = CaseResult(name="chunks", runs=1, requests=3, lacks=("no prompt was split", "few rows"))


def parsed(found: InvarianceResult, repeat: str | None = None) -> ElementTree.Element:
    (suite,) = ElementTree.fromstring(junit_xml(found, repeat=repeat))
    return suite


def test_each_case_is_a_test_case_with_its_outcome() -> None:
    suite = parsed(result(PACKED, GRAPHS, WEAK))
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("5", "0", "1")
    assert (suite.get("skipped"), suite.get("time")) == ("1", "12.500")
    cases = {case.get("name"): case for case in suite}
    assert list(cases) == ["alone", "packed", "graphs", "chunks", "power"]
    assert {case.get("classname") for case in suite} == {"pagedctl.invariance"}
    assert [len(case) for case in suite] == [0, 0, 1, 1, 0]
    assert cases["packed"].get("time") == "1.250"
    skipped, error = cases["graphs"][0], cases["chunks"][0]
    assert (skipped.tag, skipped.get("message")) == ("skipped", "the CPU has no graphs")
    assert (error.tag, error.text) == ("error", "no prompt was split\nfew rows")


def test_a_failure_tells_every_request_the_suspect_and_how_to_repeat_it() -> None:
    suspect = Suspect(
        op="gemm",
        site="o_proj",
        layer=1,
        leaf="torch.gemm",
        position=8,
        switch="batch_invariant",
        text="gemm o_proj gave other bits",
    )
    found = result(BROKEN, located=Located(suspect=suspect))
    (failure,) = parsed(found, "pagedctl invariance '--cases=packed'").iter("failure")
    assert failure.get("message") == "2 of 3 requests differ"
    lines = (failure.text or "").splitlines()
    assert lines[1] == (
        'case packed, run 9 rows: request "q?<&>", sample 0, position 9, logprob -1.0 became nan, '
        "3 ulps"
    )
    assert lines[2].startswith("case packed, run 9 rows: request 4,")
    assert lines[3] == (
        "suspect: gemm o_proj gave other bits · switch batch_invariant, leaf torch.gemm"
    )
    assert lines[4] == "repeat: pagedctl invariance '--cases=packed'"


def test_faults_that_were_not_caught_are_an_error_of_the_power() -> None:
    suite = parsed(result(PACKED, faults=(CAUGHT, MISSED, UNTRIED)))
    (error,) = suite.iter("error")
    assert error.text == "split: NOT CAUGHT in 6 requests\nsplit: not tried: no memory"


# -- the verdict over the same results -----------------------------------------------------


def test_all_equal_with_power_is_a_pass() -> None:
    verdict = result(PACKED, GRAPHS).verdict
    assert (verdict.holds, verdict.text) == (True, "BATCH-INVARIANT under invariant")
    verdict = result(PACKED, contract="rl-bitwise", still_needed=("align",)).verdict
    assert verdict.text == "BATCH-INVARIANT under rl-bitwise (align not recorded)"


def test_a_pass_of_some_cases_claims_no_more() -> None:
    verdict = result(PACKED, is_whole=False).verdict
    assert (verdict.holds, verdict.text) == (True, "equal under invariant in packed")


def test_a_difference_is_a_no_whatever_else_is_missing() -> None:
    found = result(BROKEN, WEAK, faults=(MISSED,))
    assert found.verdict.holds is False
    assert found.verdict.text == ("NOT BATCH-INVARIANT under invariant: 2 requests differ (packed)")
    assert found.first == BROKEN.divergences[0]


def test_without_power_there_is_no_verdict() -> None:
    """vllm-project/vllm-omni#5512: a pass says that something could have failed."""
    for found in (result(PACKED, WEAK), result(PACKED, faults=(CAUGHT, MISSED)), result()):
        assert (found.verdict.holds, found.verdict.text) == (None, "NO VERDICT under invariant")
        assert found.lacks()
    assert result(PACKED, WEAK).lacks() == (
        "case chunks: no prompt was split",
        "case chunks: few rows",
    )
    assert result().lacks() == ("nothing was compared: no chosen case applies here",)


def test_what_options_left_out_is_told_and_what_does_not_exist_is_not() -> None:
    prefix = CaseResult(name="prefix", not_run="the prefix cache is off")
    assert result(PACKED, GRAPHS, prefix).left_out == ("prefix: the prefix cache is off",)
    assert result(PACKED, GRAPHS).proved == ("packed",)


def test_the_metrics_count_rows_of_compared_runs_alone() -> None:
    alone = CaseResult(name="alone", runs=1, rows={1: 900}, is_reference=True)
    other = replace(PACKED, name="repeat", rows={64: 1, 7: 2})
    found = result(cases=(alone, PACKED, other)).metrics()
    assert found["resident_rows"] == {"7": 2, "64": 10}
    assert (found["runs"], found["requests_differing"]) == (5, 0)
    assert (found["planted_faults_caught"], found["first_divergence"]) == (1, None)
    broken = result(BROKEN).metrics()["first_divergence"]
    assert isinstance(broken, dict)
    assert (broken["case"], broken["position"], broken["ulps"]) == ("packed", 9, 3)
