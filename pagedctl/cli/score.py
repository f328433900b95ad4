"""``pagedctl score``: given token ids in, their logprobs out, or compared."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagedctl.cli.engine_sections import print_warnings, recorded_run
from pagedctl.cli.exit_codes import ExitCode
from pagedctl.cli.explain_numerics import explain_numerics
from pagedctl.cli.jsonl_streams import completed_file
from pagedctl.cli.progress import Progress, open_progress
from pagedctl.cli.resume_header import PartialHeader
from pagedctl.cli.score_comparison import Comparison
from pagedctl.cli.score_job import Asked, ScoreJob, read_all, score_job_of
from pagedctl.cli.score_output import NoScores, ScoreFile, ScoreOutput, ScoreStream
from pagedctl.cli.score_tally import ScoreTally
from pagedctl.cli.session import Session, print_error
from pagedctl.cli.words import count_of
from pagedctl.engine.manifest_sections import fill_from_config, fill_from_engine
from pagedctl.engine.request import ScoreRequest, Scores
from pagedctl.engine.request_faults import spelled
from pagedctl.engine.score_lines import ScoreLine
from pagedctl.errors import RequestError
from pagedctl.manifest.schema import WorkloadInfo
from pagedctl.manifest.writer import ManifestBuilder

if TYPE_CHECKING:
    from pagedctl.engine.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Results:
    """Where scores go and what they amount to; ``comparison`` with --check only."""

    output: ScoreOutput
    tally: ScoreTally
    comparison: Comparison | None


def run(session: Session) -> ExitCode:
    """Check all lines, build the engine, score; write, or compare, or both.

    1 if a compared logprob differs, 2 if a line has no answer, or nothing was compared.
    """
    if session["explain_numerics"]:
        return explain_numerics(session)
    job = score_job_of(session)
    file = None if job.output is None else ScoreFile(job.output)
    with (
        file or nullcontext(),
        PartialHeader(job.partial, exists=False) as header,
        recorded_run(session, output=job.output) as builder,
    ):
        fill_from_config(builder, job.config)
        asked = read_all(job)
        builder.files.append(asked.input)
        builder.workload = WorkloadInfo(spec=asked.input.path, seed=None, sha256=asked.input.sha256)
        _show_lines_without_answer(session, asked)
        streamed = ScoreStream(session.result) if job.streams_lines else NoScores()
        results = Results(
            output=file or streamed,
            tally=ScoreTally(num_skipped=asked.num_skipped),
            comparison=Comparison() if job.check else None,
        )
        with _engine_for(session, builder, job, asked) as engine:
            if file is not None:
                file.begin()
            header.write(builder)
            _score(session, builder, job, asked, results, engine)
    assert builder.closed is not None
    session.emit(builder.closed)
    return _exit_code(builder, results.tally)


def _exit_code(builder: ManifestBuilder, tally: ScoreTally) -> ExitCode:
    if builder.verdict is not None and builder.verdict.holds is not None:
        return ExitCode.YES if builder.verdict.holds else ExitCode.NO
    unanswered = tally.num_refused or tally.num_failed or builder.verdict is not None
    return ExitCode.NO_ANSWER if unanswered else ExitCode.YES


# -- before scoring --------------------------------------------------------------------------


def _show_lines_without_answer(session: Session, asked: Asked) -> None:
    faults = [fault for line in asked.refused for fault in line.error.faults]
    if faults:
        print_error(RequestError.of(faults), session.environ)
    elif not asked.lines:
        session.warn("the input holds nothing to score")
    if asked.num_skipped:
        session.warn(f"skipped {count_of(asked.num_skipped, 'error line')} without tokens")


@contextmanager
def _engine_for(
    session: Session, builder: ManifestBuilder, job: ScoreJob, asked: Asked
) -> Iterator[Engine | None]:
    """The engine, described in the manifest; None where there is nothing to score."""
    if not asked.lines:
        yield None
        return
    from pagedctl.engine.engine import Engine

    with Engine(job.config, needs_record=not job.check) as engine:
        fill_from_engine(builder, engine)
        print_warnings(session, builder)
        yield engine


# -- scoring ---------------------------------------------------------------------------------


def _score(
    session: Session,
    builder: ManifestBuilder,
    job: ScoreJob,
    asked: Asked,
    results: Results,
    engine: Engine | None,
) -> None:
    """Answer every line; counts, files and the verdict are recorded however it ends."""
    started_s = time.perf_counter()
    try:
        with completed_file(builder, job.output, results.output):
            for line in asked.refused:
                results.tally.refuse()
                results.output.refused(line.id, line.sample, line.error)
            if engine is not None:
                with open_progress(
                    session, "score", unit="sequences", shares_terminal=job.fills_terminal
                ) as progress:
                    _serve(engine, asked.lines, results, progress)
    finally:
        elapsed_s = asked.read_s + time.perf_counter() - started_s
        _record_results(builder, asked, results, engine, elapsed_s)
        _show_results(session, builder, job, results, engine)


def _serve(
    engine: Engine, lines: tuple[ScoreLine, ...], results: Results, progress: Progress
) -> None:
    """Score all *lines*; each is written and compared as soon as it is done."""
    tally = results.tally
    by_key = {(line.id, line.sample): line for line in lines}
    for found in tally.timed(engine.scores(_accepted(engine, lines, results))):
        line = by_key[found.id, found.sample]
        scores = _placed_failure(line, found)
        results.output.scores(scores)
        tally.finish(line, scores)
        if results.comparison is not None and scores.error is None:
            results.comparison.compare(line, scores)
        text = f"{count_of(tally.scored_tokens, 'token')} scored"
        progress.update(tally.num_answered, len(lines), text)


def _accepted(
    engine: Engine, lines: tuple[ScoreLine, ...], results: Results
) -> Iterator[ScoreRequest]:
    """The requests that the engine takes; what its pool cannot hold is refused alone."""
    for line in lines:
        try:
            request = engine.check_score(line.request())
        except RequestError as late:
            error = _placed(line, late)
            results.tally.refuse(error)
            results.output.refused(line.id, line.sample, error)
        else:
            yield request


def _placed(line: ScoreLine, error: RequestError) -> RequestError:
    """*error*, which the engine raised for *line*, with the line's place."""
    name = f"score {spelled(line.id)}"
    faults = [replace(one, where=one.where.replace(name, line.where, 1)) for one in error.faults]
    return RequestError.of_kind(error.kind, faults)


def _placed_failure(line: ScoreLine, scores: Scores) -> Scores:
    """*scores* of *line*; the place of a failure is the line's."""
    if scores.error is None:
        return scores
    return replace(scores, error=replace(scores.error, where=line.where))


def _record_results(
    builder: ManifestBuilder,
    asked: Asked,
    results: Results,
    engine: Engine | None,
    end_to_end_s: float,
) -> None:
    """Metrics, and the verdict of a check."""
    stats = None if engine is None else engine.stats()
    capacity = None if engine is None else engine.capacity()
    builder.metrics = results.tally.metrics(stats, capacity, end_to_end_s=end_to_end_s)
    if results.comparison is not None:
        builder.metrics |= results.comparison.metrics()
        builder.verdict = results.comparison.verdict(len(asked.lines) + len(asked.refused))


def _show_results(
    session: Session,
    builder: ManifestBuilder,
    job: ScoreJob,
    results: Results,
    engine: Engine | None,
) -> None:
    """What failed, the first difference, and the last line."""
    problems = results.tally.problems()
    if problems is not None:
        print_error(problems, session.environ)
    say = session.note if job.streams_lines else session.show_if_heard
    comparison, verdict = results.comparison, builder.verdict
    if comparison is not None and comparison.first is not None:
        say(comparison.first.sentence())
    summary = results.tally.summary(None if engine is None else engine.stats())
    say(summary if verdict is None else f"{summary} · {verdict.text}")
