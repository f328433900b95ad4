"""``pagedctl generate``: requests in, completions out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pagedctl.cli.completion_output import CompletionOutput, FileOutput, LinesOutput, TextOutput
from pagedctl.cli.completion_tally import Tally
from pagedctl.cli.engine_sections import print_warnings, recorded_run
from pagedctl.cli.exit_codes import ExitCode
from pagedctl.cli.generate_job import Job, job_of
from pagedctl.cli.progress import Progress, open_progress
from pagedctl.cli.session import Session, print_error
from pagedctl.cli.words import count_of
from pagedctl.config.surface import GROUPS
from pagedctl.engine.jsonl import RefusedLine, read_prompts, read_requests
from pagedctl.engine.manifest_sections import fill_from_config, fill_from_engine
from pagedctl.engine.request import Completion, Request, Stats
from pagedctl.errors import PagedctlError, RequestError
from pagedctl.manifest import files
from pagedctl.manifest.schema import FileEntry, WorkloadInfo
from pagedctl.manifest.writer import ManifestBuilder, to_bytes
from pagedctl.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pagedctl.engine.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Asked:
    """All lines, checked: what to serve, what was refused, and the seconds that took."""

    requests: tuple[Request, ...]
    refused: tuple[RefusedLine, ...]
    read_s: float


def run(session: Session) -> ExitCode:
    """Check all lines, build the engine, sample, write; 2 if a request has no whole answer."""
    job = job_of(session)
    tally = Tally()
    with (
        nullcontext() if job.output is None else FileOutput(job.output) as claimed,
        _PartialHeader(job.partial) as header,
        recorded_run(session, output=job.output) as builder,
    ):
        _record_options(builder, session, job)
        asked = _read_all(builder, job)
        _show_refused_lines(session, asked)
        output = claimed or _stream_output(session, job, asked)
        if asked.requests:
            from pagedctl.engine.engine import Engine

            with Engine(job.config, run_seed=job.run_seed) as engine:
                fill_from_engine(builder, engine)
                print_warnings(session, builder)
                header.write(builder)
                _sample(session, builder, job, asked, output, tally, engine)
        else:
            header.write(builder)
            _sample(session, builder, job, asked, output, tally, None)
    assert builder.closed is not None
    session.emit(builder.closed)
    return ExitCode.NO_ANSWER if tally.num_refused or tally.num_failed else ExitCode.YES


class _PartialHeader:
    """The run's header beside the output while the run lasts; the manifest replaces it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._builder: ManifestBuilder | None = None

    def write(self, builder: ManifestBuilder) -> None:
        """Publish what *builder* knows by now, as what a killed run leaves."""
        if self._path is not None:
            files.write_new(self._path, to_bytes(builder.snapshot("interrupted")))
            self._builder = builder

    def __enter__(self) -> _PartialHeader:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._builder is not None and self._builder.closed is not None:
            assert self._path is not None
            with suppress(OSError):
                self._path.unlink()


# -- before sampling -------------------------------------------------------------------------


def _record_options(builder: ManifestBuilder, session: Session, job: Job) -> None:
    """Every option of the command that says what is computed, and the work."""
    own = (*GROUPS["sampling"].options, *GROUPS["jsonl"].options, *session.command.options)
    builder.config |= {name: session[name] for name in own}
    builder.config_origin |= {name: session.options.origins[name] for name in own}
    fill_from_config(builder, job.config)
    builder.workload = WorkloadInfo(spec=job.rules.source, seed=job.run_seed, sha256=None)


def _read_all(builder: ManifestBuilder, job: Job) -> Asked:
    """Every line as a request or a refusal, before any weights are loaded."""
    started_s = time.perf_counter()
    if job.lines is None:
        found = list(read_prompts(job.prompts, job.rules))
    else:
        with job.lines as lines:
            found = list(read_requests(lines, job.rules))
            entry = FileEntry(
                role="input", path=lines.name, sha256=lines.sha256, bytes=lines.size_bytes
            )
        builder.files.append(entry)
        builder.workload = WorkloadInfo(spec=lines.name, seed=job.run_seed, sha256=lines.sha256)
    return Asked(
        requests=tuple(one for one in found if isinstance(one, Request)),
        refused=tuple(one for one in found if isinstance(one, RefusedLine)),
        read_s=time.perf_counter() - started_s,
    )


def _show_refused_lines(session: Session, asked: Asked) -> None:
    faults = [fault for line in asked.refused for fault in line.error.faults]
    if faults:
        print_error(RequestError.of(faults), session.environ)
    elif not asked.requests:
        session.warn("the input holds no requests")


# -- sampling --------------------------------------------------------------------------------


def _sample(
    session: Session,
    builder: ManifestBuilder,
    job: Job,
    asked: Asked,
    output: CompletionOutput,
    tally: Tally,
    engine: Engine | None,
) -> None:
    """Write a line for every request; counts and files are recorded however it ends."""
    started_s = time.perf_counter()
    try:
        with _completed_file(builder, job, output):
            for line in asked.refused:
                tally.refuse()
                output.refusal(line.id, line.error)
            if engine is not None:
                with open_progress(
                    session, "generate", unit="samples", shares_terminal=job.fills_terminal
                ) as progress:
                    _serve(engine, asked.requests, job.tokenizer, output, tally, progress)
    finally:
        elapsed_s = asked.read_s + time.perf_counter() - started_s
        _record_results(session, builder, job, tally, engine, elapsed_s)


@contextmanager
def _completed_file(builder: ManifestBuilder, job: Job, output: CompletionOutput) -> Iterator[None]:
    """Close *output* and record its digest; what went wrong before that wins."""

    def complete() -> None:
        output.close()
        if job.output is not None:
            builder.add_file("output", job.output)

    try:
        yield
    except BaseException:
        with suppress(PagedctlError):
            complete()
        raise
    complete()


def _stream_output(session: Session, job: Job, asked: Asked) -> CompletionOutput:
    if job.text_output:
        num_samples = sum(request.params.n for request in asked.requests)
        return TextOutput(session.result, num_samples=num_samples)
    return LinesOutput(session.result)


def _serve(
    engine: Engine,
    requests: tuple[Request, ...],
    tokenizer: Tokenizer | None,
    output: CompletionOutput,
    tally: Tally,
    progress: Progress,
) -> None:
    """Submit all requests and step until every one is answered."""
    for request in requests:
        try:
            with tally.engine_time():
                engine.submit(request)
            tally.ask(request)
        except RequestError as error:
            tally.refuse(error)
            output.refusal(request.id, error)
    while engine.has_unfinished():
        with tally.engine_time():
            finished = engine.step()
        for completion in finished:
            output.completion(completion, _text(completion, tokenizer))
            tally.finish(completion)
        progress.update(tally.num_finished, tally.num_samples, _load(engine.stats()))


def _text(completion: Completion, tokenizer: Tokenizer | None) -> str | None:
    """The completion's text, without that of the stop token; None without a tokenizer."""
    if tokenizer is None:
        return None
    stop = completion.stop_reason
    return tokenizer.decode(
        completion.token_ids.tolist(), stop_token_id=stop if isinstance(stop, int) else None
    )


def _load(stats: Stats) -> str:
    tokens = count_of(stats.output_tokens, "token")
    return f"{tokens}, {stats.running} running, {stats.waiting} waiting"


def _record_results(
    session: Session,
    builder: ManifestBuilder,
    job: Job,
    tally: Tally,
    engine: Engine | None,
    end_to_end_s: float,
) -> None:
    """Metrics, and the last line."""
    stats = None if engine is None else engine.stats()
    capacity = None if engine is None else engine.capacity()
    builder.metrics = tally.metrics(stats, capacity, end_to_end_s=end_to_end_s)
    problems = tally.problems()
    if problems is not None:
        print_error(problems, session.environ)
    summary = tally.summary(stats)
    if job.output is None:
        session.note(summary)
    else:
        session.show_if_heard(summary)
