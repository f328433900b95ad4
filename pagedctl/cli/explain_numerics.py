"""``--explain-numerics`` of every command with a contract: show what would hold, run nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, get_args

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pagedctl.cli.exit_codes import ExitCode
from pagedctl.cli.session import Session
from pagedctl.manifest import files, strict_json
from pagedctl.manifest.schema import NumericsInfo
from pagedctl.numerics.resolution import Numerics, Refused, Resolution, Setting
from pagedctl.numerics.switches import FIXED, FIXED_BRANCH, SWITCHES, Branch, spelled

if TYPE_CHECKING:
    from pagedctl.engine.explanation import ExplainedModel, ExplainedSite, Explanation

NOTHING = "-"
FIXED_RULE = "held in every contract"
UNTIL_THEN = (
    "generate and score without --check refuse the contract where it is asked for, unless "
    "--unverified; what is the default runs with a warning"
)


def explain_numerics(session: Session) -> ExitCode:
    """The tree, the leaves and who vouches for them, on stdout; with --json the object of it.

    Needs no input and reads no weights. Raises what a run with these options would be refused
    with, after the tree was shown.
    """
    if session.json_path is not None:
        files.refuse_existing(session.json_path, "--json")
    from pagedctl.engine.explanation import explain

    found = explain(session.options, session.environ)
    session.show(*_renderables(found))
    if found.error is not None:
        raise found.error
    _emit(session, found.info())
    _note_partial_checks(session, found.sites())
    return ExitCode.YES


def _emit(session: Session, info: NumericsInfo) -> None:
    """The ``numerics`` object of manifests, where --json wants it."""
    data = strict_json.dumps(info.to_json_object(), indent=True) + b"\n"
    if session.json_path is not None:
        files.write_new(session.json_path, data)
    elif session.bare_json:
        session.result.write(data.decode())
        session.result.flush()


def _note_partial_checks(session: Session, sites: tuple[ExplainedSite, ...]) -> None:
    partial = [one.name for one in sites if one.tried_columns is not None]
    if partial:
        session.note(
            f"leaves checked themselves on part of the columns of {', '.join(partial)}; "
            "a run checks all of them, which takes longer and more memory"
        )


# -- what is shown ---------------------------------------------------------------------------


def _renderables(found: Explanation) -> Iterator[RenderableType]:
    yield Text(_title(found))
    yield Text(found.numerics.contract.promise)
    yield Text("")
    yield _tree(found.resolution, found.numerics)
    if found.model is None:
        return
    yield Text("")
    yield _site_table(found.sites())
    choices = [one for one in found.sites() if len(one.standings()) > 1]
    if choices:
        yield Text("")
        yield _candidate_table(choices)
    yield Text("")
    yield _voucher_table(found.info(), found.model)


def _title(found: Explanation) -> str:
    """``numerics · invariant · embedded · cpu float32 · arithmetic 0123456789abcdef``."""
    parts = ["numerics", found.numerics.contract.name]
    if found.model is not None:
        bound = found.model.bound
        parts += [bound.spec.name, f"{bound.config.device} {bound.spec.dtype}"]
        parts.append(f"arithmetic {bound.plans.arithmetic_id}")
    return " · ".join(parts)


def _tree(resolution: Resolution, numerics: Numerics) -> Table:
    """Every switch under its branch; below it the value that the contract did not take."""
    table = _table("switch", "value", "set by", "changes", "what it fixes", folded=(2, 4))
    refused = {one.switch: one for one in resolution.refused}
    for branch, names in _branches():
        table.add_row(branch)
        for name, rule in names:
            setting = numerics.settings[name]
            table.add_row(f"  {name}", *_cells(setting), _rule(setting, rule))
            if name in refused:
                table.add_row(*_refused_cells(refused[name]))
    return table


def _branches() -> Iterator[tuple[Branch, list[tuple[str, str]]]]:
    """Each branch with its switches and what each of them fixes."""
    for branch in get_args(Branch):
        names = [(one.name, one.rule) for one in SWITCHES if one.branch == branch]
        if branch == FIXED_BRANCH:
            names += [(name, FIXED_RULE) for name in FIXED]
        yield branch, names


def _cells(setting: Setting) -> tuple[str, str, str]:
    value = NOTHING if setting.value is None else spelled(setting.value)
    return value, setting.set_by, setting.changes


def _rule(setting: Setting, rule: str) -> str:
    return rule if setting.note is None else f"{rule} ({setting.note})"


def _refused_cells(refused: Refused) -> tuple[str, str, str, str, str]:
    origin = refused.fault.where.partition(", set by ")[2]
    return "    refused", spelled(refused.value), origin, NOTHING, refused.fault.rule


def _site_table(sites: tuple[ExplainedSite, ...]) -> Table:
    table = _table("call site", "leaf", "", folded=(0,))
    for one in sites:
        part, columns = one.tried_columns, one.plan.site.facts.get("n")
        note = "" if part is None else f"checked on {part:,} of {columns:,} columns"
        table.add_row(one.name, one.plan.leaf.name, note)
    return table


def _candidate_table(sites: list[ExplainedSite]) -> Table:
    """The leaves that were looked at where there is more than one; equal sites once."""
    table = _table("candidates at", "leaf", "standing", folded=(0, 2))
    for (op, standings), members in groupby(_by_op(sites), key=_op_and_standings):
        names = ", ".join(one.plan.site.name for one in members)
        for position, (leaf, standing) in enumerate(standings):
            table.add_row(f"{op} {names}" if position == 0 else "", leaf, standing)
    return table


def _by_op(sites: list[ExplainedSite]) -> list[ExplainedSite]:
    """Sites of one op and one outcome side by side, in the order in which each op comes up."""
    keys = [_op_and_standings(one) for one in sites]
    return sorted(sites, key=lambda one: keys.index(_op_and_standings(one)))


def _op_and_standings(one: ExplainedSite) -> tuple[str, tuple[tuple[str, str], ...]]:
    return one.plan.site.op, one.standings()


def _voucher_table(info: NumericsInfo, model: ExplainedModel) -> Table:
    """Who vouches for the contract, or what is missing and how to earn it; what is pinned."""
    table = _table("verified", "yes" if info.verified else "no", folded=(1,))
    if info.bitwise:
        table.add_row("eligible by", info.eligible_by or NOTHING)
    for reason in model.eligibility.reasons:
        table.add_row("missing", reason)
    if model.how_to_earn:
        table.add_row("to earn it", model.how_to_earn)
        table.add_row("until then", UNTIL_THEN)
    for variable, value in info.pins.items():
        if value is not None:
            table.add_row("pinned", f"{variable}={value}")
    return table


def _table(*columns: str, folded: tuple[int, ...]) -> Table:
    """Without lines. Texts in the columns *folded* are wrapped where it is narrow."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for position, column in enumerate(columns):
        table.add_column(column, no_wrap=position not in folded, overflow="fold")
    return table
