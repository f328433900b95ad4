"""``pagedctl invariance`` itself, on an engine that is broken at one selection point.

It ends with 1 and names the request, the position, the suspect, and a command that repeats it;
beside a sound engine it ends with 0. ``test_product_mutants.py`` has the same mutants in the
proof's library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pagedctl.cli.main import main
from pagedctl.verify import power_check
from tests.verify.product_mutants import HERE_AND_THERE, MUTANTS

OFTEN = (
    "another o_proj for many rows",
    "an attention path for several tokens",
    "positions that restart at a chunk",
    "positions behind a preemption",
    "prefix blocks in another order",
    "a token that comes too late",
    "seeds that count the requests",
    "truncation to one token in a full batch",
    "seeds of another process",
)
"""The mutants that are run every time; at least one for each case but the pools'."""

NUM_REQUESTS = 4
SMALL_POWER = {"REQUESTS": 2, "MOST_TOKENS": 4, "FAST_REQUESTS": 1, "FAST_TOKENS": 2}
"""Sizes of the check of power where it decides nothing: a request differs anyway."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One run of the command."""

    code: int
    out: str
    manifest: dict[str, Any]

    @property
    def metrics(self) -> dict[str, Any]:
        found: dict[str, Any] = self.manifest["metrics"]
        return found


Invariance = Callable[..., Ran]


@pytest.fixture
def invariance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Invariance:
    """Run the command in this process, on the embedded model, over a few short requests."""
    for name in [name for name in os.environ if name.startswith("PAGEDCTL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("PAGEDCTL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Ran:
        capfd.readouterr()
        sizes = ("--requests", str(NUM_REQUESTS), "--max-tokens", "8", "--dtype", "float32")
        code = main(["invariance", *sizes, "--no-progress", "--json", "proof.json", *words])
        out, _ = capfd.readouterr()
        manifest = json.loads((tmp_path / "proof.json").read_bytes())
        return Ran(code=code, out=out, manifest=manifest)

    return run


def expensive(name: str) -> Any:
    return pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow)


def processes(case: str) -> str:
    return "2" if case == "process" else "1"


@pytest.mark.parametrize("name", [expensive(name) for name in MUTANTS])
def test_the_command_ends_with_1_and_names_request_position_and_suspect(
    invariance: Invariance, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    mutant = MUTANTS[name]
    for size, number in SMALL_POWER.items():
        monkeypatch.setattr(power_check, size, number)
    reached = mutant.put(monkeypatch)
    ran = invariance("--cases", mutant.case, "--processes", processes(mutant.case))
    first, suspect = ran.metrics["first_divergence"], ran.metrics["suspect"]
    assert reached.count > 0
    assert ran.code == 1
    assert ran.manifest["verdict"]["holds"] is False
    assert ran.metrics["requests_differing"] > 0
    assert first["case"] == mutant.case
    assert f"position {first['position']}" in ran.out
    assert str(first["id"]) in ran.out
    assert "pagedctl invariance" in ran.out
    if name in HERE_AND_THERE:
        assert suspect == {"repeated": False}
        return
    assert suspect["op"] in mutant.suspects
    assert suspect["text"] in ran.out


@pytest.mark.parametrize(
    "cases",
    [
        "process,rescore,prefix,sampled",
        pytest.param("packed,repeat,chunks,pools,preemption", marks=pytest.mark.slow),
    ],
)
def test_a_sound_engine_ends_with_0(invariance: Invariance, cases: str) -> None:
    ran = invariance("--cases", cases)
    assert ran.code == 0
    assert ran.metrics["requests_differing"] == 0
    assert ran.metrics["planted_faults_caught"] == 4
    assert (ran.metrics["first_divergence"], ran.metrics["suspect"]) == (None, None)


def test_every_case_has_a_mutant_that_is_run_every_time() -> None:
    assert {MUTANTS[name].case for name in OFTEN} == {
        *("packed", "process", "chunks", "preemption", "prefix", "rescore", "sampled"),
    }
    assert {mutant.case for mutant in MUTANTS.values()} >= {"pools", "repeat"}
