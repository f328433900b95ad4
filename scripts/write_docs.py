"""Write the generated parts of docs/: the command reference and the table of orders.

Usage: python scripts/write_docs.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from pagedctl.cli.reference import reference_page
from pagedctl_kernels.house import TABLE
from pagedctl_kernels.order import OrderTemplate

ROOT = Path(__file__).resolve().parent.parent
OPEN = (
    "<!-- orders: generated from kernels/pagedctl_kernels/house.py by scripts/write_docs.py -->\n"
)
CLOSE = "<!-- /orders -->"


def orders_block() -> str:
    """The house orders as one Markdown table per op, a column per device class."""
    by_op: dict[str, list[OrderTemplate]] = {}
    for template in TABLE:
        by_op.setdefault(template.op, []).append(template)
    return "\n".join(_op_table(op, columns) for op, columns in by_op.items())


def _op_table(op: str, columns: list[OrderTemplate]) -> str:
    names = list(dict.fromkeys(name for column in columns for name, _ in column.terms))
    classes = [column.device_class for column in columns]
    lines = [
        f"\n**{op}**\n",
        f"| term | {' | '.join(classes)} |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for name in names:
        cells = [dict(column.terms).get(name, "") for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """Every generated page with its current text."""
    arithmetic = ROOT / "docs" / "arithmetic.md"
    text = arithmetic.read_text(encoding="utf-8")
    head, _, rest = text.partition(OPEN)
    _, _, tail = rest.partition(CLOSE)
    return {
        arithmetic: head + OPEN + orders_block() + CLOSE + tail,
        ROOT / "docs" / "cli.md": reference_page(),
    }


def main() -> int:
    stale = [
        path
        for path, text in pages().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"stale: {path.relative_to(ROOT)}; run python scripts/write_docs.py")
        return 1 if stale else 0
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
