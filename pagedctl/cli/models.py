"""``pagedctl models``: which models a name finds here, and what one of them is."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table

from pagedctl.cli.exit_codes import ExitCode
from pagedctl.cli.model_tables import inspection_tables, list_table
from pagedctl.cli.session import Session
from pagedctl.config.home import home_folder
from pagedctl.engine.verification import present_versions
from pagedctl.manifest.environment import run_facts
from pagedctl.manifest.schema import ManifestWarning
from pagedctl.manifest.writer import ManifestBuilder
from pagedctl.models.inspection import Inspection, inspect_model, list_models, model_info
from pagedctl.models.model_digest import model_digest
from pagedctl.models.spec import ModelSpec
from pagedctl.numerics.envelopes import Envelope
from pagedctl.numerics.plugins import installed
from pagedctl.numerics.profiles import PROFILES, Profile
from pagedctl.numerics.records import (
    DAMAGED_RECORD,
    Records,
    read_records,
    records_folder,
    records_of,
)

SLOW_BYTES = 1 << 30
"""More than this to hash is announced; it takes about a second per GiB, once."""


CHECKED_AT_START = "checked when an engine starts"


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
    records = read_records(records_folder(home_folder(session.environ)))
    eligible = eligibility(resolved.spec, records)
    builder.metrics = {**inspection.metrics(), "eligible": eligible}
    builder.warnings = [
        ManifestWarning(code=one.code, where=one.where, text=one.text)
        for one in resolved.spec.warnings
    ]
    for error in records.damaged:
        text = f"a verification record cannot be read: {error.what}"
        builder.warn(DAMAGED_RECORD, where=error.where, text=text)
    return inspection_tables(inspection, digest, eligible)


def eligibility(spec: ModelSpec, records: Records) -> dict[str, dict[str, object]]:
    """Each contract that the model may run under, and what vouches for it.

    ``eligible_by`` names a shipped profile or the verification records of this architecture,
    dtype and versions. What only a built engine knows is compared when one starts.
    """
    return {one.name: _standing(one, spec, records) for one in installed().envelopes}


def _standing(contract: Envelope, spec: ModelSpec, records: Records) -> dict[str, object]:
    if not contract.bitwise:
        return _entry(None, True, f"{contract.promise}; nothing to verify")
    profile = Profile(
        family=spec.family, dtype=spec.dtype, device_class="cpu", contract=contract.name
    )
    if profile in PROFILES:
        return _entry(str(profile), True, f"leaves and switches are {CHECKED_AT_START}")
    facts = {
        "contract": contract.name,
        "spec_digest": spec.spec_digest,
        "family": spec.family,
        "dtype": spec.dtype,
        **{f"versions.{name}": value for name, value in asdict(present_versions()).items()},
    }
    found = records_of(facts, records)
    needed = contract.evidence
    paths = [str(one.path) for command in needed for one in found.get(command, ())]
    lacking = [command for command in needed if command not in found]
    if not lacking:
        text = f"arithmetic, device, leaves and switches are {CHECKED_AT_START}"
        return _entry(" and ".join(paths), True, text)
    text = f"unverified: no profile covers {spec.family} {spec.dtype}, and there is no record of "
    text += " or of ".join(lacking)
    return _entry(None, False, f"{text}; there is {', '.join(paths)}" if paths else text)


def _entry(eligible_by: str | None, verified: bool, text: str) -> dict[str, object]:
    return {"eligible_by": eligible_by, "verified": verified, "text": text}


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
