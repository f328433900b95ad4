"""``pagedctl invariance``: the same bits whatever shares the batch, proved or refuted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pagedctl.bench.workloads import Workload
from pagedctl.cli.engine_sections import print_warnings, recorded_run
from pagedctl.cli.exit_codes import ExitCode
from pagedctl.cli.explain_numerics import explain_numerics
from pagedctl.cli.invariance_job import InvarianceJob, invariance_job_of, repeat_command
from pagedctl.cli.invariance_prompts import read_prompts
from pagedctl.cli.invariance_table import header, lines_below, table, verdict_line
from pagedctl.cli.progress import open_progress
from pagedctl.cli.session import Session
from pagedctl.config.engine_config import EngineConfig
from pagedctl.config.home import home_folder
from pagedctl.engine.manifest_sections import fill_from_config, fill_from_engine
from pagedctl.engine.request import Request, SamplingParams
from pagedctl.errors import ConfigError, Fault
from pagedctl.manifest import files
from pagedctl.manifest.schema import WorkloadInfo
from pagedctl.manifest.writer import ManifestBuilder, describe_file
from pagedctl.numerics.records import records_folder

if TYPE_CHECKING:
    from pagedctl.engine.engine import Engine
    from pagedctl.verify.invariance_requests import RequestMaker
    from pagedctl.verify.invariance_result import InvarianceResult


def run(session: Session) -> ExitCode:
    """Prove it: 0; find a request that differs: 1; no power to see one: 2."""
    if session["explain_numerics"]:
        return explain_numerics(session)
    job = invariance_job_of(session)
    with recorded_run(session) as builder:
        if job.records:
            builder.config["record"] = str(job.record or records_folder(_home(session)))
        config = EngineConfig.from_resolved(session.options)
        fill_from_config(builder, config)
        result = _prove(session, builder, job, config)
    assert builder.closed is not None
    session.emit(builder.closed)
    holds = result.verdict.holds
    if holds is None:
        return ExitCode.NO_ANSWER
    return ExitCode.YES if holds else ExitCode.NO


def _prove(
    session: Session, builder: ManifestBuilder, job: InvarianceJob, config: EngineConfig
) -> InvarianceResult:
    """Build the engine, run the proof, show it, and write what was asked for."""
    from pagedctl.engine.engine import Engine
    from pagedctl.verify.invariance import InvarianceProof, request_maker, require_promise

    require_promise(config)
    prompts = None
    if job.prompts is not None:
        prompts = read_prompts(builder, job.prompts, config, job.requests)
    with Engine(config, needs_record=False) as engine:
        fill_from_engine(builder, engine)
        maker = request_maker(engine, job.max_tokens)
        requests = _requests(builder, job, maker, prompts)
        if job.records:
            _refuse_narrow_record(engine, requests)
        print_warnings(session, builder)
        session.show(header(engine, requests, max_tokens=job.max_tokens))
        proof = InvarianceProof(
            engine=engine,
            maker=maker,
            requests=requests,
            cases=job.cases,
            processes=job.processes,
            bisect=job.bisect,
        )
        with open_progress(session, "invariance", unit="parts") as progress:
            result = proof.run(progress.update)
        repeat = None if result.first is None else repeat_command(session, result.first.case)
        _fill(builder, result, repeat)
        session.show(table(result), *lines_below(result, repeat), verdict_line(result, engine))
        _write_junit(builder, job, result, repeat)
        builder.close_complete()
        _write_record(session, builder, job, result, engine)
    return result


def _requests(
    builder: ManifestBuilder,
    job: InvarianceJob,
    maker: RequestMaker,
    prompts: list[Request] | None,
) -> tuple[Request, ...]:
    """The requests of the proof, described in the manifest."""
    if prompts is None:
        requests = maker.requests(job.requests)
        spec = f"invariance:requests={job.requests},max_tokens={job.max_tokens},seed={maker.seed}"
    else:
        requests = maker.of_prompts(prompts)
        spec = str(job.prompts)
    workload = Workload(
        name="invariance",
        spec=spec,
        seed=maker.seed,
        requests=requests,
        exact_lengths=True,
        sampling=SamplingParams(),
    )
    builder.workload = WorkloadInfo(spec=spec, seed=maker.seed, sha256=workload.sha256())
    return requests


def _refuse_narrow_record(engine: Engine, requests: tuple[Request, ...]) -> None:
    """A record grants more than some runs look at."""
    from pagedctl.verify.record_scope import too_narrow

    faults = [
        Fault(
            what=f"this run earns no record: {text}",
            where="option record",
            rule="a record holds for every batch and length",
            remedy=remedy,
        )
        for text, remedy in too_narrow(engine.config, engine.spec, requests)
    ]
    if faults:
        raise ConfigError.of(faults)


def _fill(builder: ManifestBuilder, result: InvarianceResult, repeat: str | None) -> None:
    builder.verdict = result.verdict
    builder.metrics = {**result.metrics(), "repeat": repeat}


def _write_junit(
    builder: ManifestBuilder, job: InvarianceJob, result: InvarianceResult, repeat: str | None
) -> None:
    if job.junit is None:
        return
    from pagedctl.verify.junit import junit_xml

    files.write_new(job.junit, junit_xml(result, repeat=repeat))
    builder.add_file("junit", job.junit)


def _write_record(
    session: Session,
    builder: ManifestBuilder,
    job: InvarianceJob,
    result: InvarianceResult,
    engine: Engine,
) -> None:
    """The record of a pass, which names the manifest that lies there by now."""
    if not job.records:
        return
    if result.left_out or not result.verdict.holds:
        why = ", ".join(result.left_out) or "not every case passed"
        session.warn(f"no record is written: {why}")
        return
    from pagedctl.engine.verification import record_of, write_record

    assert builder.target is not None
    record = record_of(
        engine.parts.model,
        command="invariance",
        cases=result.proved,
        manifest=describe_file("manifest", builder.target.path),
    )
    path = write_record(record, job.record, session.environ)
    session.note(f"record: {path}")


def _home(session: Session) -> Path:
    return home_folder(session.environ)
