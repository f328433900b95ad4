#!/usr/bin/env python3
"""Times the kernels on this GPU: each op, and whole stacks of linear layers.

    python scripts/bench_kernels.py                        # everything
    python scripts/bench_kernels.py --only stack-8b,attention --json times.json

Beside each time stand the floor (bytes and operations at the rates that this GPU was measured to
reach, in the same run) and the vendor's time for the same work. Operands rotate over more memory
than the cache holds. The ratio is vendor over ours: above 1, ours is faster.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from pagedctl.bench.kernels.report import OPS, KernelBench  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=",".join(OPS), help=f"some of {','.join(OPS)}")
    parser.add_argument("--workload", help="only batches whose name holds this")
    parser.add_argument("--rows", type=int, nargs="+", help="of the stack, instead of all")
    parser.add_argument("--json", type=Path, help="also write every trial here")
    given = parser.parse_args()
    only = given.only.split(",")
    if unknown := sorted({*only} - {*OPS}):
        parser.error(f"--only: {', '.join(unknown)} is none of {', '.join(OPS)}")
    bench = KernelBench(Console(width=None if sys.stdout.isatty() else 130))
    for op in only:
        bench.run(op, workload=given.workload, rows=given.rows)
    if given.json:
        text = json.dumps(bench.as_object(), indent=1, allow_nan=False)
        given.json.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
