"""The result of ``pagedctl invariance`` for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pagedctl.cli.words import count_of
from pagedctl.engine.request import Request

if TYPE_CHECKING:
    from pagedctl.engine.engine import Engine
    from pagedctl.verify.case_result import CaseResult
    from pagedctl.verify.invariance_result import InvarianceResult

NOTHING = "-"
MOST_LACKS = 8
"""Lacks that are told; the others are in the manifest."""


def header(engine: Engine, requests: Sequence[Request], *, max_tokens: int) -> Text:
    """``invariance · embedded · cpu float32 · invariant · 64 requests x 64 tokens``."""
    config, spec = engine.config, engine.spec
    work = f"{count_of(len(requests), 'request')} x {count_of(max_tokens, 'token')}"
    device = f"{config.device} {spec.dtype}"
    return Text(" · ".join(("invariance", spec.name, device, config.numerics, work)))


def table(result: InvarianceResult) -> Table:
    """One case a row."""
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    found.add_column("case", no_wrap=True)
    for name in ("runs", "requests", "tokens", "resident rows p50/max"):
        found.add_column(name, justify="right", no_wrap=True)
    found.add_column("result", overflow="fold")
    for one in result.cases:
        found.add_row(one.name, *_numbers(one), one.text())
    return found


def lines_below(result: InvarianceResult, repeat: str | None) -> Iterator[RenderableType]:
    """The selection points; what differs first and how to see it again; what has no power."""
    yield Text("")
    yield _grid((one.name, one.standing, one.text) for one in result.points)
    yield Text("")
    yield _grid((f"planted fault {one.name}", one.sentence()) for one in result.faults)
    first = result.first
    if first is not None:
        yield Text(f"first divergence: {first.sentence()}")
        if result.located is not None:
            yield Text(result.located.sentence())
        yield Text(f"repeat: {repeat}")
    yield from (Text(f"no verdict: {text}") for text in _shown(result.lacks()))


def verdict_line(result: InvarianceResult, engine: Engine) -> Text:
    """``power: 4 of 4 planted faults caught · ... · BATCH-INVARIANT under ... · 1 min 31 s``."""
    config = engine.config
    parts = (
        f"power: {result.faults_caught} of {len(result.faults)} planted faults caught",
        _fast(result),
        result.verdict.text,
        f"{config.device} {engine.spec.dtype} tp {config.tp}",
        duration(result.wall_s),
    )
    return Text(" · ".join(parts))


def duration(seconds: float) -> str:
    """``31 s``, ``1 min 31 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes:,} min {rest} s" if minutes else f"{rest} s"


def _fast(result: InvarianceResult) -> str:
    found = result.fast
    if found is None:
        return "fast could not run here"
    differing = f"{found.requests_differing:,} of {count_of(found.requests, 'request')}"
    return f"fast differs in {differing} (reported, not required)"


def _numbers(case: CaseResult) -> tuple[str, str, str, str]:
    if case.not_run is not None:
        return NOTHING, NOTHING, NOTHING, NOTHING
    rows = f"{case.rows_p50:,} / {case.rows_max:,}" if case.rows else NOTHING
    return f"{case.runs:,}", f"{case.requests:,}", f"{case.tokens:,}", rows


def _shown(lacks: Sequence[str]) -> Iterator[str]:
    yield from lacks[:MOST_LACKS]
    if len(lacks) > MOST_LACKS:
        yield f"{len(lacks) - MOST_LACKS} more, in the manifest"


def _grid(rows: Iterator[tuple[str, ...]]) -> Table:
    """Columns of words without headings; the last one folds."""
    cells = list(rows)
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for place in range(len(cells[0]) if cells else 0):
        last = place == len(cells[0]) - 1
        found.add_column(no_wrap=not last, overflow="fold")
    for row in cells:
        found.add_row(*row)
    return found
