"""The plan file (``pagedctl.plan/1``): parsed, and checked as a whole, by every command.

A command that does not use a table ignores it, but a broken table is refused all the same:
a plan is judged where it is read, not where it first hurts.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pagedctl.config.acceptance import BOUND_RULE, Bound, parse_bound
from pagedctl.config.kinds import Broken
from pagedctl.config.loader import (
    Source,
    broken_fault,
    check_value,
    plan_source,
    spell,
    unknown_name,
)
from pagedctl.config.options import Option
from pagedctl.config.surface import COMMANDS, PLAN_TABLES, VALIDATE_RUNS
from pagedctl.errors import ConfigError, Fault

SCHEMA = "pagedctl.plan/1"
_TOP_LEVEL = ("schema", "name", "validate", "acceptance")
_STEP_KEYS = ("id", "run", "with")
_STEP_EXTRAS = ("optional", "file", "files")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of ``[validate]``: runs a command and leaves one manifest."""

    id: str
    run: str
    overrides: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """A checked plan file.

    ``options`` holds the values of all tables by option name (each name lives in one table,
    given by ``tables``). ``steps`` and ``acceptance`` keep the file's order; an acceptance
    line is ``(STEP.METRIC, bound)``.
    """

    path: str
    name: str
    options: Mapping[str, object]
    tables: Mapping[str, str]
    steps: tuple[Step, ...]
    acceptance: tuple[tuple[str, Bound], ...]

    def source(self, options: Iterable[str]) -> Source:
        """The plan as a source for a command that has *options*."""
        wanted = set(options)
        values = {name: value for name, value in self.options.items() if name in wanted}
        return plan_source(self.path, values, self.tables)


def read_plan_file(path: str) -> PlanFile:
    """Read and check a plan file; raises ConfigError with every fault found in it."""
    document = _parse(path)
    checker = _Checker(path)
    checker.check_head(document)
    for table, options in PLAN_TABLES.items():
        checker.check_table(table, options, _table(document, table))
    steps = checker.check_steps(document.get("validate"))
    checker.check_references(steps)
    acceptance = checker.check_acceptance(document.get("acceptance"), steps)
    if checker.faults:
        raise ConfigError.of(checker.faults)
    return PlanFile(
        path=path,
        name=str(document["name"]),
        options=checker.values,
        tables=checker.tables,
        steps=steps,
        acceptance=acceptance,
    )


def _parse(path: str) -> dict[str, object]:
    try:
        return tomllib.loads(Path(path).read_bytes().decode("utf-8-sig"))
    except OSError as problem:
        raise ConfigError(
            f"the plan file cannot be read: {problem.strerror}",
            where=path,
            rule="--plan names a readable TOML file",
            remedy="check the path",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ConfigError(
            f"the plan file is not TOML: {problem}",
            where=path,
            rule="a plan file is UTF-8 TOML",
            remedy="correct the place named above",
        ) from None


def _table(document: Mapping[str, object], dotted: str) -> object:
    """The table at *dotted*, without the sub-tables that are checked on their own."""
    found: object = document
    for part in dotted.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    if isinstance(found, dict):
        inner = {name.split(".")[1] for name in PLAN_TABLES if name.startswith(dotted + ".")}
        return {key: value for key, value in found.items() if key not in inner}
    return found


class _Checker:
    """Collects values and faults of one plan file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.faults: list[Fault] = []
        self.values: dict[str, object] = {}
        self.tables: dict[str, str] = {}

    def fault(self, what: str, key: str, rule: str, remedy: str) -> None:
        where = f"{self.path}, key {key}"
        self.faults.append(Fault(what=what, where=where, rule=rule, remedy=remedy))

    def check_head(self, document: Mapping[str, object]) -> None:
        if document.get("schema") != SCHEMA:
            self.fault(
                f"schema is {spell(document.get('schema', 'absent'))}",
                "schema",
                f'this version reads schema = "{SCHEMA}"',
                f'write schema = "{SCHEMA}" if the file follows it',
            )
        name = document.get("name")
        if not isinstance(name, str) or not name:
            self.fault("the plan has no name", "name", "name is text", 'write name = "..."')
        known = [*_TOP_LEVEL, *(table for table in PLAN_TABLES if "." not in table)]
        for key in document:
            if key not in known:
                self.faults.append(unknown_name(key, known, f"{self.path}, table {key}"))

    def check_table(self, table: str, options: Mapping[str, Option], content: object) -> None:
        if content is None:
            return
        if not isinstance(content, dict):
            self.fault(f"{table} is not a table", table, "a table of options", f"write [{table}]")
            return
        for key, value in content.items():
            if key not in options:
                self._misplaced(table, key, options)
                continue
            if self.check_option(options[key], value, f"{table}.{key}"):
                self.values[key] = rebased(options[key], value, Path(self.path).parent)
                self.tables[key] = table

    def _misplaced(self, table: str, key: str, options: Mapping[str, Option]) -> None:
        where = f"{self.path}, key {table}.{key}"
        homes = [name for name, known in PLAN_TABLES.items() if key in known]
        if homes:
            self.fault(
                f"{key} does not belong into {table}",
                f"{table}.{key}",
                "each option has one table",
                f"move it to [{homes[0]}]",
            )
        else:
            self.faults.append(unknown_name(key, options, where))

    def check_option(self, one: Option, value: object, key: str) -> bool:
        if isinstance(value, str) and value.startswith("@"):
            return True
        try:
            check_value(one, value, as_text=False)
        except Broken as broken:
            self.faults.append(broken_fault(one.name, value, broken, f"{self.path}, key {key}"))
            return False
        return True

    def check_steps(self, content: object) -> tuple[Step, ...]:
        if content is None:
            return ()
        if not isinstance(content, dict) or set(content) != {"steps"}:
            self.fault(
                "validate does not hold steps alone",
                "validate",
                "[validate] has one key, steps",
                "write steps = [ { id = ..., run = ... }, ... ]",
            )
            return ()
        listed = content["steps"]
        if not isinstance(listed, list) or not listed:
            self.fault("steps is not a list", "validate.steps", "a list of tables", "list steps")
            return ()
        steps: list[Step] = []
        for position, entry in enumerate(listed):
            step = self._check_step(entry, f"validate.steps[{position}]", steps)
            if step is not None:
                steps.append(step)
        return tuple(steps)

    def _check_step(self, entry: object, key: str, earlier: list[Step]) -> Step | None:
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
            self.fault("a step has no id", key, "a step is a table with id and run", "name it")
            return None
        for name in entry:
            if name not in _STEP_KEYS:
                self.faults.append(unknown_name(name, _STEP_KEYS, f"{self.path}, key {key}"))
        step_id, run, overrides = entry["id"], entry.get("run"), entry.get("with", {})
        if step_id in {step.id for step in earlier}:
            self.fault(f"step id {step_id} is used twice", key, "step ids are unique", "rename it")
        if run not in VALIDATE_RUNS or not isinstance(overrides, dict):
            self.fault(
                f"step {step_id} runs {spell(run)}",
                key,
                f"run is one of {', '.join(VALIDATE_RUNS)}; with is a table",
                "name a command",
            )
            return None
        self._check_overrides(run, overrides, f"{key}.with")
        for reference in _references(overrides):
            if reference not in {step.id for step in earlier}:
                self.fault(
                    f"@{reference} is not an earlier step",
                    f"{key}.with",
                    '"@id" is the file of a step that ran before',
                    "reorder the steps or correct the id",
                )
        return Step(id=step_id, run=run, overrides=overrides)

    def _check_overrides(self, run: str, overrides: Mapping[str, object], key: str) -> None:
        command = COMMANDS.get(run)
        options: Mapping[str, Option] = command.all_options() if command else {}
        for name, value in overrides.items():
            if name in _STEP_EXTRAS:
                continue
            if name not in options:
                known = [*options, *_STEP_EXTRAS]
                self.faults.append(unknown_name(name, known, f"{self.path}, key {key}.{name}"))
                continue
            self.check_option(options[name], value, f"{key}.{name}")

    def check_references(self, steps: tuple[Step, ...]) -> None:
        """Each ``"@id"`` in a table names a step."""
        ids = {step.id for step in steps}
        for name in self.values:
            for reference in _references({name: self.values[name]}):
                if reference not in ids:
                    self.fault(
                        f"@{reference} names no step",
                        f"{self.tables[name]}.{name}",
                        '"@id" is the file of a step',
                        "correct the id or add the step",
                    )

    def check_acceptance(
        self, content: object, steps: tuple[Step, ...]
    ) -> tuple[tuple[str, Bound], ...]:
        if content is None:
            return ()
        if not isinstance(content, dict):
            self.fault("acceptance is not a table", "acceptance", "a table", "write [acceptance]")
            return ()
        lines: list[tuple[str, Bound]] = []
        ids = {step.id for step in steps}
        for metric, text in content.items():
            bound = parse_bound(text) if isinstance(text, str) else None
            if bound is None:
                self.fault(
                    f"{metric} has the bound {spell(text)}",
                    f'acceptance."{metric}"',
                    BOUND_RULE,
                    "correct it",
                )
                continue
            for name in (metric, bound.other):
                if name is not None and name.split(".")[0] not in ids:
                    self.fault(
                        f"{name} names no step",
                        f'acceptance."{metric}"',
                        "STEP.METRIC, STEP one of validate.steps",
                        "correct the step's id",
                    )
            lines.append((metric, bound))
        return tuple(lines)


def rebased(one: Option, value: object, folder: Path) -> object:
    """A plan's value with its relative paths taken from the plan file's *folder*."""
    mode = getattr(one.kind, "path", "never")
    if isinstance(value, list):
        return [rebased(one, part, folder) for part in value]
    if mode == "never" or not isinstance(value, str) or value in ("", "-") or value[0] == "@":
        return value
    candidate = folder / value
    if mode == "always" or candidate.exists():
        return str(candidate)
    return value


def _references(overrides: Mapping[str, object]) -> list[str]:
    """The step ids that ``"@id"`` values name."""
    found: list[str] = []
    for value in overrides.values():
        parts = value if isinstance(value, list) else [value]
        found += [part[1:] for part in parts if isinstance(part, str) and part.startswith("@")]
    return found
