"""What ``pagedctl score`` was asked to do: options checked, input opened, nothing written."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from pagedctl.cli.generate_job import partial_beside
from pagedctl.cli.jsonl_streams import input_of
from pagedctl.cli.parsing import STANDARD_STREAM
from pagedctl.cli.session import Session
from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.input_lines import InputLines
from pagedctl.engine.request_limits import RequestLimits
from pagedctl.engine.score_fields import SCORED_BASES, ScoreLineRules
from pagedctl.engine.score_lines import (
    RefusedScoreLine,
    ScoreLine,
    SkippedLine,
    read_score_lines,
)
from pagedctl.errors import ConfigError
from pagedctl.manifest import files
from pagedctl.manifest.schema import FileEntry
from pagedctl.models.locate import locate_model
from pagedctl.models.resolve import resolve_model


@dataclass(frozen=True, kw_only=True)
class ScoreJob:
    """A run to do. ``output`` None: no file.

    ``streams_lines``: score lines go to stdout, which then holds nothing else.
    ``fills_terminal``: and that is a terminal.
    """

    config: EngineConfig
    rules: ScoreLineRules
    lines: InputLines
    output: Path | None
    streams_lines: bool
    fills_terminal: bool

    @property
    def check(self) -> bool:
        return self.rules.check

    @property
    def partial(self) -> Path | None:
        """The file of the run's header while it lasts."""
        return None if self.output is None else partial_beside(self.output)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """All lines, checked: what to score, what was refused, and the seconds that took.

    ``input`` is what was read. ``num_skipped`` error lines hold nothing to score.
    """

    lines: tuple[ScoreLine, ...]
    refused: tuple[RefusedScoreLine, ...]
    num_skipped: int
    input: FileEntry
    read_s: float


def score_job_of(session: Session) -> ScoreJob:
    """The job that *session*'s options describe; ConfigError or ModelError if there is none."""
    check = bool(session["check"])
    output = _output(session)
    streams_lines = session["output"] == STANDARD_STREAM or (output is None and not check)
    if streams_lines and session.bare_json:
        raise _two_results()
    config = EngineConfig.from_resolved(session.options)
    basis = str(config.contract["logprob_basis"])
    if basis not in SCORED_BASES:
        raise _unscored_basis(basis)
    resolved = resolve_model(
        locate_model(config.model, environ=session.environ),
        dtype=config.dtype,
        weights="required" if config.random_weights is None else "ignore",
    )
    start, temperature = session["start"], session["temperature"]
    assert isinstance(start, int)
    assert isinstance(temperature, float)
    lines = input_of(session, _no_input())
    return ScoreJob(
        config=config,
        rules=ScoreLineRules(
            source=lines.name,
            limits=RequestLimits.of(resolved.spec, config.max_model_len),
            start=start,
            temperature=temperature,
            check=check,
            logprob_basis=basis,
        ),
        lines=lines,
        output=output,
        streams_lines=streams_lines,
        fills_terminal=streams_lines and session.result.isatty(),
    )


def read_all(job: ScoreJob) -> Asked:
    """Every line as a sequence or a refusal, before any weights are loaded."""
    started_s = time.perf_counter()
    with job.lines as lines:
        found = list(read_score_lines(lines, job.rules))
        entry = FileEntry(
            role="input", path=lines.name, sha256=lines.sha256, bytes=lines.size_bytes
        )
    return Asked(
        lines=tuple(one for one in found if isinstance(one, ScoreLine)),
        refused=tuple(one for one in found if isinstance(one, RefusedScoreLine)),
        num_skipped=sum(isinstance(one, SkippedLine) for one in found),
        input=entry,
        read_s=time.perf_counter() - started_s,
    )


def _output(session: Session) -> Path | None:
    """The file to write, which must not exist, and whose neighbours must not either."""
    named = session["output"]
    if named is None or named == STANDARD_STREAM:
        return None
    output = Path(str(named))
    partial = partial_beside(output)
    written = {"--output": output, "the run's header beside --output": partial}
    if session.json_path is not None:
        written["--json"] = session.json_path
    files.refuse_clashes(written)
    files.refuse_existing(output, "--output")
    files.refuse_existing(partial, "--output")
    return output


def _no_input() -> ConfigError:
    return ConfigError(
        "there is nothing to score",
        where="command line",
        rule="sequences come from --input, or through a pipe",
        remedy="give --input FILE; --input - also reads a terminal",
    )


def _two_results() -> ConfigError:
    return ConfigError(
        "--json without a path would mix the manifest with the score lines",
        where="command line",
        rule="stdout holds one thing",
        remedy="give --output FILE, or --json PATH",
    )


def _unscored_basis(basis: str) -> ConfigError:
    return ConfigError(
        f"score has no logprobs of basis {basis}",
        where="option logprob_basis",
        rule=f"a given sequence is scored with basis {' or '.join(SCORED_BASES)}: it has no "
        "penalties, biases or truncation",
        remedy="leave --logprob-basis out",
    )
