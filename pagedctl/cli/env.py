"""``pagedctl env``: versions, devices, what works, and what does not and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rich import box
from rich.table import Table

from pagedctl.cli.exit_codes import ExitCode
from pagedctl.cli.session import Session
from pagedctl.config.home import home_folder
from pagedctl.manifest.capabilities import Capability
from pagedctl.manifest.environment import EnvironmentReport, inspect_environment
from pagedctl.numerics.plugins import installed


def run(session: Session) -> ExitCode:
    """Look, and show; the exit code is 0 unless looking is impossible."""
    with session.manifest_builder(reads_only=True) as builder:
        found = inspect_environment(environ=session.environ, home=home_folder(session.environ))
        report = replace(found, capabilities=(*found.capabilities, *_plugins()))
        for section, value in report.manifest_sections().items():
            setattr(builder, section, value)
    session.show(_versions(report), _devices(report), _capabilities(report))
    assert builder.closed is not None
    session.emit(builder.closed)
    return ExitCode.YES


def _plugins() -> Iterator[Capability]:
    """Every installed plug-in: taken, or broken and why."""
    here = installed()
    for name in here.plugins:
        yield Capability(name=f"plug-in {name}", works=True, detail="its contracts and leaves")
    for fault in here.faults:
        yield Capability(name="plug-in", works=False, detail=fault.what, remedy=fault.remedy)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _versions(report: EnvironmentReport) -> Table:
    table = _table("package", "version")
    table.add_row("pagedctl", _tool_text(report))
    for name, version in report.facts.versions.items():
        if not name.endswith("_reason"):
            table.add_row(name, version or "-")
    return table


def _tool_text(report: EnvironmentReport) -> str:
    tool = report.facts.tool
    commit = f" (commit {tool.commit}{', modified' if tool.dirty else ''})" if tool.commit else ""
    return f"{tool.version}{commit}"


def _devices(report: EnvironmentReport) -> Table:
    table = _table("device", "capability", "memory GiB")
    cpu = report.cpu
    for device in (cpu.as_device(rank=0, capability=cpu.architecture), *report.facts.devices):
        total = device.memory_total_bytes
        memory = "-" if total is None else f"{total / (1 << 30):,.2f}"
        table.add_row(device.name, device.capability or "-", memory)
    return table


def _capabilities(report: EnvironmentReport) -> Table:
    table = _table("what", "works", "detail", "remedy")
    for one in report.capabilities:
        table.add_row(one.name, "yes" if one.works else "no", one.detail, one.remedy or "")
    return table
