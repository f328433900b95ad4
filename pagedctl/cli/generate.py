"""``pagedctl generate``: requests in, completions out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedctl.cli.completion_output import CompletionOutput, FileOutput, LinesOutput, TextOutput
from pagedctl.cli.completion_tally import Tally
from pagedctl.cli.engine_sections import print_warnings, recorded_run
from pagedctl.cli.exit_codes import ExitCode
from pagedctl.cli.explain_numerics import explain_numerics
from pagedctl.cli.fault_notes import note_faults
from pagedctl.cli.generate_job import Asked, Job, job_of, placed, read_all
from pagedctl.cli.jsonl_streams import completed_file
from pagedctl.cli.progress import Progress, open_progress
from pagedctl.cli.resume import (
    Earlier,
    answer_of_complete,
    earlier_runs,
    fill_from_header,
    require_same_engine,
)
from pagedctl.cli.resume_header import PartialHeader
from pagedctl.cli.session import Session, print_error
from pagedctl.cli.words import count_of
from pagedctl.config.surface import GROUPS
from pagedctl.engine.completed_lines import (
    CompletedLines,
    OpenRequest,
    open_refusals,
    open_requests,
)
from pagedctl.engine.jsonl import RefusedLine
from pagedctl.engine.manifest_sections import fill_from_config, fill_from_engine
from pagedctl.engine.request import Completion, Stats
from pagedctl.errors import RequestError
from pagedctl.manifest.schema import Manifest, WorkloadInfo
from pagedctl.manifest.writer import ManifestBuilder

if TYPE_CHECKING:
    from pagedctl.engine.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one run does: all of the work, or what earlier runs left of it."""

    job: Job
    asked: Asked
    requests: tuple[OpenRequest, ...]
    refused: tuple[RefusedLine, ...]
    output: CompletionOutput
    tally: Tally


def run(session: Session) -> ExitCode:
    """Check all lines, build the engine, sample, write; 2 if a request has no whole answer."""
    if session["explain_numerics"]:
        return explain_numerics(session)
    job = job_of(session)
    if job.output is None:
        return _run(session, job, None)
    with FileOutput(job.output, existing=job.resumes) as output:
        return _resume(session, job, output) if job.resumes else _run(session, job, output)


def _resume(session: Session, job: Job, output: FileOutput) -> ExitCode:
    """Do what is left of an earlier run; all of it where none began."""
    if not output.locked:
        session.warn(f"this file system has no locks: let no other run write {job.output}")
    earlier = earlier_runs(session, job, output)
    if earlier.complete is not None:
        return answer_of_complete(session, job, earlier.complete)
    if earlier.header is not None:
        torn = ", and a torn one cut off" if earlier.completed.torn_bytes else ""
        kept = count_of(earlier.completed.num_lines, "line")
        session.note(f"resuming {job.output}: {kept} kept{torn}")
    return _run(session, job, output, earlier)


def _run(
    session: Session, job: Job, file: FileOutput | None, earlier: Earlier | None = None
) -> ExitCode:
    """Answer all requests, or what *earlier* runs left of them."""
    completed = CompletedLines() if earlier is None else earlier.completed
    before = None if earlier is None else earlier.header
    tally = Tally(completed)
    with (
        PartialHeader(job.partial, exists=before is not None) as header,
        recorded_run(session, output=job.output) as builder,
    ):
        _record_options(builder, session, job)
        asked = read_all(job) if earlier is None else earlier.asked
        _record_input(builder, job, asked)
        _show_refused_lines(session, asked)
        _warn_of_absent_fields(session, job, asked)
        part = Part(
            job=job,
            asked=asked,
            requests=open_requests(asked.requests, asked.refused, completed),
            refused=open_refusals(asked.refused, completed),
            output=file or _stream_output(session, job, asked),
            tally=tally,
        )
        with _engine_for(session, builder, part, before) as engine:
            if file is not None:
                file.begin(completed.size_bytes)
            header.write(builder)
            _sample(session, builder, part, engine)
    assert builder.closed is not None
    session.emit(builder.closed)
    return ExitCode.NO_ANSWER if tally.has_errors else ExitCode.YES


# -- before sampling -------------------------------------------------------------------------


def _record_options(builder: ManifestBuilder, session: Session, job: Job) -> None:
    """Every option of the command that says what is computed, and the work."""
    own = (*GROUPS["sampling"].options, *GROUPS["jsonl"].options, *session.command.options)
    builder.config |= {name: session[name] for name in own}
    builder.config_origin |= {name: session.options.origins[name] for name in own}
    fill_from_config(builder, job.config)
    builder.workload = WorkloadInfo(spec=job.rules.source, seed=job.run_seed, sha256=None)


def _record_input(builder: ManifestBuilder, job: Job, asked: Asked) -> None:
    if asked.input is not None:
        builder.files.append(asked.input)
        builder.workload = WorkloadInfo(
            spec=asked.input.path, seed=job.run_seed, sha256=asked.input.sha256
        )


def _show_refused_lines(session: Session, asked: Asked) -> None:
    faults = [fault for line in asked.refused for fault in line.error.faults]
    if faults:
        print_error(RequestError.of(faults), session.environ)
    elif not asked.requests:
        session.warn("the input holds no requests")


def _warn_of_absent_fields(session: Session, job: Job, asked: Asked) -> None:
    """A field to keep that no request has is most likely misspelt."""
    for name in job.rules.keep or ():
        if asked.requests and not any(name in (one.metadata or {}) for one in asked.requests):
            session.warn(f"no request has the field {name}, which --keep names")


def _stream_output(session: Session, job: Job, asked: Asked) -> CompletionOutput:
    if job.text_output:
        num_samples = sum(request.params.n for request in asked.requests)
        return TextOutput(session.result, num_samples=num_samples)
    return LinesOutput(session.result)


def _engine_for(
    session: Session, builder: ManifestBuilder, part: Part, before: Manifest | None
) -> AbstractContextManager[Engine | None]:
    """The engine, entered in the manifest; None where no request is left for it."""
    if part.requests:
        return _built_engine(session, builder, part.job, before)
    if before is not None:
        fill_from_header(builder, before)
    return nullcontext()


@contextmanager
def _built_engine(
    session: Session, builder: ManifestBuilder, job: Job, before: Manifest | None
) -> Iterator[Engine]:
    from pagedctl.engine.engine import Engine

    with Engine(job.config, run_seed=job.run_seed) as engine:
        fill_from_engine(builder, engine)
        if before is not None:
            require_same_engine(job, before, builder.snapshot("interrupted"))
        print_warnings(session, builder)
        yield engine


# -- sampling --------------------------------------------------------------------------------


def _sample(session: Session, builder: ManifestBuilder, part: Part, engine: Engine | None) -> None:
    """Write a line for all that is open; counts and files are recorded however it ends."""
    started_s = time.perf_counter()
    try:
        with completed_file(builder, part.job.output, part.output):
            for line in part.refused:
                part.tally.refuse()
                part.output.refusal(line.id, line.error)
            if engine is not None:
                with open_progress(
                    session, "generate", unit="samples", shares_terminal=part.job.fills_terminal
                ) as progress:
                    failed = _serve(engine, part, progress)
                note_faults(session, builder, engine, failed)
    except BaseException:
        if part.job.output is not None:
            session.note("the same command with --resume finishes the output")
        raise
    finally:
        elapsed_s = part.asked.read_s + time.perf_counter() - started_s
        _record_results(session, builder, part, engine, elapsed_s)


def _serve(engine: Engine, part: Part, progress: Progress) -> list[Completion]:
    """Submit all that is open and step until every sample is answered; those that failed."""
    tally = part.tally
    failed: list[Completion] = []
    for one in part.requests:
        try:
            with tally.engine_time():
                engine.submit(one.request, samples=one.samples)
            tally.ask(one)
        except RequestError as error:
            refusal = placed(part.job, part.asked, one.request, error)
            tally.refuse(refusal)
            part.output.refusal(one.request.id, refusal)
    while engine.has_unfinished():
        with tally.engine_time():
            finished = engine.step()
        for completion in finished:
            part.output.completion(completion)
            tally.finish(completion)
            if completion.error is not None:
                failed.append(completion)
        progress.update(tally.num_finished, tally.num_samples, _load(engine.stats()))
    return failed


def _load(stats: Stats) -> str:
    tokens = count_of(stats.output_tokens, "token")
    return f"{tokens}, {stats.running} running, {stats.waiting} waiting"


def _record_results(
    session: Session,
    builder: ManifestBuilder,
    part: Part,
    engine: Engine | None,
    end_to_end_s: float,
) -> None:
    """Metrics, and the last line."""
    stats = None if engine is None else engine.stats()
    capacity = None if engine is None else engine.capacity()
    builder.metrics = part.tally.metrics(stats, capacity, end_to_end_s=end_to_end_s)
    problems = part.tally.problems()
    if problems is not None:
        print_error(problems, session.environ)
    summary = part.tally.summary(stats)
    if part.job.output is None:
        session.note(summary)
    else:
        session.show_if_heard(summary)
