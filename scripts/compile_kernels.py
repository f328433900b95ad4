"""Compile every kernel for the GPUs it serves, without one, and check the limits of each build.

Usage: python scripts/compile_kernels.py [--target sm_80 sm_90] [--only OP ...] [--json]

Exit code 1 if a build does not compile or breaks a limit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels"))

from pagedctl_kernels.builds import CAPABILITIES, Build, house_builds

if TYPE_CHECKING:
    from pagedctl_kernels.compile_report import CompileReport


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One build for one capability: its report, and what is wrong with it."""

    build: Build
    capability: int
    report: CompileReport | None
    problems: tuple[str, ...]


def compiled(build: Build, capability: int) -> Outcome:
    from pagedctl_kernels.compile_report import compile_build

    try:
        report = compile_build(build, capability)
    except Exception as failure:  # the compiler raises what it likes; the table names it
        said = " ".join(f"{type(failure).__name__}: {failure}".split())[:400]
        return Outcome(build=build, capability=capability, report=None, problems=(said,))
    return Outcome(
        build=build, capability=capability, report=report, problems=tuple(report.broken())
    )


def outcomes(builds: list[tuple[Build, int]], processes: int) -> list[Outcome]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        return list(pool.map(compiled, *zip(*builds, strict=True)))


def as_json(one: Outcome) -> dict[str, Any]:
    report = None if one.report is None else asdict(one.report)
    return {
        "kernel": one.build.kernel,
        "label": one.build.label,
        "target": f"sm_{one.capability}",
        "report": report,
        "problems": one.problems,
    }


def as_table(found: list[Outcome]) -> Table:
    table = Table("kernel", "build", "target", "registers", "local", "shared", "fma", "units", "")
    for one in found:
        cells = [one.build.kernel.partition(":")[2], one.build.label, f"sm_{one.capability}"]
        if one.report is None:
            table.add_row(*cells, *[""] * 5, "; ".join(one.problems), style="red")
            continue
        r, limits = one.report, one.build
        kinds = {kind.split(".")[0] for kind in r.matrix} | {
            k.removeprefix("cp.") for k in r.copies
        }
        cells += [f"{r.registers}/{limits.registers}", f"{r.local_bytes}/{limits.spills}"]
        cells += [str(r.shared_bytes), str(r.fused), " ".join(sorted(kinds))]
        table.add_row(*cells, "; ".join(one.problems), style="red" if one.problems else "")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", nargs="+", default=[f"sm_{one}" for one in CAPABILITIES])
    parser.add_argument("--only", nargs="+", help="ops, by the name of their folder")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 8))
    parser.add_argument("--json", action="store_true")
    wanted = parser.parse_args()
    capabilities = [int(target.removeprefix("sm_")) for target in wanted.target]
    builds = [
        (build, capability)
        for op, of_op in house_builds().items()
        if not wanted.only or op in wanted.only
        for build in of_op
        for capability in capabilities
        if capability in build.capabilities
    ]
    if not builds:
        parser.error("no build is of these ops and targets")
    found = outcomes(builds, wanted.processes)
    if wanted.json:
        print(json.dumps([as_json(one) for one in found], indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else 200).print(as_table(found))
    return int(any(one.problems for one in found))


if __name__ == "__main__":
    raise SystemExit(main())
