"""Write the generated parts of docs/: the command reference, and tables made of the data.

Usage: python scripts/write_docs.py [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from pagedctl.cli.reference import reference_page
from pagedctl.config.engine_config import engine_options
from pagedctl.config.kinds import Pattern
from pagedctl.numerics.envelopes import house_envelopes
from pagedctl.numerics.pins import PINS
from pagedctl.numerics.profiles import PROFILES
from pagedctl.numerics.resolution import CONTRACT, Setting, draft_numerics, spelled
from pagedctl.numerics.switches import FIXED, FIXED_BRANCH, SWITCHES, Branch, Switch
from pagedctl_kernels.house import TABLE
from pagedctl_kernels.order import OrderTemplate

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def orders_block() -> str:
    """The house orders as one Markdown table per op, a column per device class."""
    by_op: dict[str, list[OrderTemplate]] = {}
    for template in TABLE:
        by_op.setdefault(template.op, []).append(template)
    return "\n".join(_op_table(op, columns) for op, columns in by_op.items())


def _op_table(op: str, columns: list[OrderTemplate]) -> str:
    names = list(dict.fromkeys(name for column in columns for name, _ in column.terms))
    rows = [[name, *(dict(column.terms).get(name, "") for column in columns)] for name in names]
    return f"\n**{op}**\n\n" + _table(["term", *(one.device_class for one in columns)], rows)


def switches_block() -> str:
    """The tree of switches: what each takes, what each contract makes of it, what it changes.

    A value that the contract itself sets is printed bold.
    """
    contracts = house_envelopes()
    heads = ["switch", "values", *(f"`{one.name}`" for one in contracts), "changes", "fixes"]
    return _table(heads, _switch_rows())


def _switch_rows() -> Iterator[list[str]]:
    settled = [draft_numerics(one, {}, {}).numerics.settings for one in house_envelopes()]
    for branch in get_args(Branch):
        yield [f"*{branch}*", *[""] * (len(settled) + 3)]
        for one in SWITCHES:
            if one.branch == branch:
                held = [_held(settings[one.name]) for settings in settled]
                yield [f"`{one.name}`", _values(one), *held, one.changes, one.rule]
        for name, value in FIXED.items() if branch == FIXED_BRANCH else ():
            held = [spelled(value)] * len(settled)
            yield [f"`{name}`", "no flag", *held, "sampled tokens", "held in every contract"]


def _values(one: Switch) -> str:
    if one.values:
        return ", ".join(spelled(value) for value in one.values)
    kind = engine_options()[one.name].kind
    return kind.form if isinstance(kind, Pattern) else kind.metavar


def _held(setting: Setting) -> str:
    text = "-" if setting.value is None else spelled(setting.value)
    return f"**{text}**" if setting.set_by == CONTRACT else text


def pins_block() -> str:
    """Environment variables that a switch pins."""
    rows = [
        [
            f"`{one.variable}`",
            " or ".join(one.values),
            f"`{one.switch}` {spelled(one.setting)}",
            ", ".join(one.devices) + (", tp > 1" if one.needs_ranks else ""),
            one.why,
        ]
        for one in PINS
    ]
    return _table(["variable", "value", "where", "read on", "otherwise"], rows)


def profiles_block() -> str:
    """The shipped profiles, dtypes of one family in one row."""
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for one in PROFILES:
        kinds.setdefault((one.contract, one.family, one.device_class), []).append(one.dtype)
    rows = [[f"`{key[0]}`", *key[1:], ", ".join(dtypes)] for key, dtypes in kinds.items()]
    return _table(["contract", "family", "device", "dtypes"], rows)


def _table(heads: list[str], rows: Iterator[list[str]] | list[list[str]]) -> str:
    head, *body = (f"| {' | '.join(cells)} |" for cells in (heads, *rows))
    return "\n".join((head, "|---" * len(heads) + "|", *body)) + "\n"


BLOCKS = {
    "arithmetic.md": {"orders": ("kernels/pagedctl_kernels/house.py", orders_block)},
    "numerics.md": {
        "switches": ("pagedctl/numerics/switches.py and envelopes.py", switches_block),
        "pins": ("pagedctl/numerics/pins.py", pins_block),
        "profiles": ("pagedctl/numerics/profiles.py", profiles_block),
    },
}
"""The generated blocks of each page: name -> (where the data is, what writes it)."""


def pages() -> dict[Path, str]:
    """Every generated page with its current text."""
    found = {DOCS / "cli.md": reference_page()}
    for page, blocks in BLOCKS.items():
        text = (DOCS / page).read_text(encoding="utf-8")
        for name, (source, write) in blocks.items():
            text = _with_block(text, name, source, write())
        found[DOCS / page] = text
    return found


def _with_block(text: str, name: str, source: str, block: str) -> str:
    """*text* with what stands between the two marks of the block *name* replaced."""
    opening = f"<!-- {name}: generated from {source} by scripts/write_docs.py -->\n"
    closing = f"<!-- /{name} -->"
    head, found, rest = text.partition(opening)
    _, ended, tail = rest.partition(closing)
    if not found or not ended:
        raise SystemExit(f"the marks of the block {name} are missing: {opening}{closing}")
    return head + opening + block + closing + tail


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
