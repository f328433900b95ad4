"""``pagedctl models``: which models a name finds here, and what one of them is."""

from __future__ import annotations

from rich.table import Table

from pagedctl.cli.exit_codes import ExitCode
from pagedctl.cli.model_tables import inspection_tables, list_table
from pagedctl.cli.session import Session
from pagedctl.config.home import home_folder
from pagedctl.manifest.environment import run_facts
from pagedctl.manifest.schema import ManifestWarning
from pagedctl.manifest.writer import ManifestBuilder
from pagedctl.models.inspection import Inspection, inspect_model, list_models, model_info
from pagedctl.models.model_digest import model_digest
from pagedctl.models.spec import ModelSpec
from pagedctl.numerics.plugins import installed

SLOW_BYTES = 1 << 30
"""More than this to hash is announced; it takes about a second per GiB, once."""


def run_list(session: Session) -> ExitCode:
    """Every model that can be named without a path; one that cannot be served is a warning."""
    with session.manifest_builder(reads_only=True) as builder:
        _fill_header(builder, session)
        listed = list_models(session.environ)
        builder.metrics = {"models": [one.as_dict() for one in listed]}
        for one in listed:
            for fault in one.faults[:1]:
                more = f" (and {len(one.faults) - 1} more)" if len(one.faults) > 1 else ""
                text = f"{one.location.source} cannot be served: {fault.what}{more}"
                builder.warn("not_served", where=fault.where, text=text)
    _finish(session, builder, list_table(listed))
    return ExitCode.YES


def run_inspect(session: Session) -> ExitCode:
    """One model in full, or every reason why it cannot be served."""
    tp = session["tp"]
    assert isinstance(tp, int)
    builder = None
    try:
        with session.manifest_builder(reads_only=True) as builder:
            _fill_header(builder, session)
            name = str(session.arguments["model"])
            inspection = inspect_model(name, tp=tp, environ=session.environ)
            tables = _inspect(session, builder, inspection)
    finally:
        if builder is not None and builder.closed is not None and builder.closed.status == "failed":
            session.emit(builder.closed)
    _finish(session, builder, *tables)
    return ExitCode.YES


def _inspect(session: Session, builder: ManifestBuilder, inspection: Inspection) -> list[Table]:
    """Fill the manifest's sections about the model, and its tables."""
    resolved = inspection.resolved
    nbytes = resolved.checkpoint.nbytes if resolved.checkpoint else 0
    if nbytes > SLOW_BYTES:
        session.note(f"hashing {nbytes / 2**30:,.1f} GiB, once for these files")
    digest = model_digest(resolved, home=home_folder(session.environ))
    builder.model = model_info(resolved, digest=digest)
    eligible = eligibility(resolved.spec)
    builder.metrics = {**inspection.metrics(), "eligible": eligible}
    builder.warnings = [
        ManifestWarning(code=one.code, where=one.where, text=one.text)
        for one in resolved.spec.warnings
    ]
    return inspection_tables(inspection, digest, eligible)


def eligibility(spec: ModelSpec) -> dict[str, dict[str, object]]:
    """Each contract that the model may run under, and what vouches for it.

    ``eligible_by`` names a shipped profile or a verification record; this version has
    neither, so a bitwise contract runs unverified.
    """
    found: dict[str, dict[str, object]] = {}
    for contract in installed().envelopes:
        text = f"{contract.promise}; nothing to verify"
        if contract.bitwise:
            text = f"unverified: no profile or record covers {spec.family} {spec.dtype} yet"
        found[contract.name] = {"eligible_by": None, "verified": not contract.bitwise, "text": text}
    return found


def _fill_header(builder: ManifestBuilder, session: Session) -> None:
    facts = run_facts(session.environ)
    builder.tool = facts.tool
    builder.versions = dict(facts.versions)
    builder.devices = facts.devices
    builder.env = dict(facts.env)
    own = session.command.options
    builder.config = {name: session.options.values[name] for name in own}
    builder.config_origin = {name: session.options.origins[name] for name in own}


def _finish(session: Session, builder: ManifestBuilder, *tables: Table) -> None:
    for one in builder.warnings:
        session.warn(f"{one.text} ({one.where})")
    session.show(*tables)
    assert builder.closed is not None
    session.emit(builder.closed)
