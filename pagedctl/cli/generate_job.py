"""What ``pagedctl generate`` was asked to do: options checked, input opened, nothing written."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pagedctl.cli.jsonl_streams import input_of
from pagedctl.cli.parsing import STANDARD_STREAM
from pagedctl.cli.reserved import refuse_reserved
from pagedctl.cli.session import Session
from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.input_lines import InputLines
from pagedctl.engine.jsonl import LineRules, RefusedLine, read_prompts, read_requests
from pagedctl.engine.params_check import params_of_options
from pagedctl.engine.request import Request, RequestId
from pagedctl.engine.request_faults import spelled
from pagedctl.engine.request_limits import RequestLimits
from pagedctl.errors import ConfigError, RequestError
from pagedctl.manifest import files
from pagedctl.manifest.schema import FileEntry
from pagedctl.models.chat_template import read_chat_template
from pagedctl.models.locate import locate_model
from pagedctl.models.resolve import ResolvedModel, resolve_model
from pagedctl.models.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to do. ``output`` None: stdout. ``lines`` None: the texts of ``prompts``.

    ``resumes``: the output may exist, and is finished. ``text_output``: completions are shown as
    text, for a person at a terminal. ``fills_terminal``: completions, text or lines, go to a
    terminal.
    """

    config: EngineConfig
    resolved: ResolvedModel
    rules: LineRules
    lines: InputLines | None
    prompts: tuple[str, ...]
    output: Path | None
    resumes: bool
    text_output: bool
    fills_terminal: bool
    run_seed: int

    @property
    def partial(self) -> Path | None:
        """The file of the run's header while it lasts."""
        return None if self.output is None else partial_beside(self.output)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """All lines, checked: what to serve, what was refused, and the seconds that took.

    ``numbers`` are the line numbers of the requests, from 1. ``input`` is what was read, None
    for texts of the command line.
    """

    requests: tuple[Request, ...]
    refused: tuple[RefusedLine, ...]
    numbers: Mapping[RequestId, int]
    input: FileEntry | None
    read_s: float


def job_of(session: Session) -> Job:
    """The job that *session*'s options describe; ConfigError or ModelError if there is none."""
    refuse_reserved(session, "ray", "replicas")
    output = _output(session)
    defaults = params_of_options(session.options.values)
    config = EngineConfig.from_resolved(session.options)
    resolved = resolve_model(
        locate_model(config.model, environ=session.environ),
        dtype=config.dtype,
        weights="required" if config.random_weights is None else "ignore",
    )
    tokenizer = load_tokenizer(resolved.tokenizer)
    if session["chat"]:
        _refuse_chat_without_template(resolved, tokenizer)
    prompts = _texts(session["prompt"])
    if prompts and session["input"] is not None:
        raise _two_inputs()
    lines = None if prompts else input_of(session, _no_input())
    run_seed = session["seed"]
    assert isinstance(run_seed, int)
    fills_terminal = output is None and session.result.isatty()
    return Job(
        config=config,
        resolved=resolved,
        rules=LineRules(
            source="--prompt" if lines is None else lines.name,
            limits=RequestLimits.of(
                resolved.spec,
                config.max_model_len,
                has_tokenizer=tokenizer is not None,
                logprob_basis=str(config.contract["logprob_basis"]),
            ),
            defaults=defaults,
            keep=_texts(session["keep"]),
            encoder=tokenizer,
            chat=bool(session["chat"]),
        ),
        lines=lines,
        prompts=prompts,
        output=output,
        resumes=bool(session["resume"]),
        text_output=session["output"] is None and fills_terminal,
        fills_terminal=fills_terminal,
        run_seed=run_seed,
    )


def read_all(job: Job) -> Asked:
    """Every line as a request or a refusal, before any weights are loaded."""
    started_s = time.perf_counter()
    numbers: list[int] = []
    entry = None
    if job.lines is None:
        found = list(read_prompts(job.prompts, job.rules))
        numbers += range(1, len(found) + 1)
    else:
        with job.lines as lines:
            found = list(read_requests(_numbered(lines, numbers), job.rules))
            entry = FileEntry(
                role="input", path=lines.name, sha256=lines.sha256, bytes=lines.size_bytes
            )
    return Asked(
        requests=tuple(one for one in found if isinstance(one, Request)),
        refused=tuple(one for one in found if isinstance(one, RefusedLine)),
        numbers={
            one.id: number
            for number, one in zip(numbers, found, strict=True)
            if isinstance(one, Request)
        },
        input=entry,
        read_s=time.perf_counter() - started_s,
    )


def _numbered(
    lines: Iterable[tuple[int, bytes]], numbers: list[int]
) -> Iterator[tuple[int, bytes]]:
    """*lines*, with the number of each added to *numbers*."""
    for number, line in lines:
        numbers.append(number)
        yield number, line


def placed(job: Job, asked: Asked, request: Request, error: RequestError) -> RequestError:
    """*error*, which the engine raised for *request*, with the place of its line."""
    number = asked.numbers[request.id]
    source = job.rules.source
    place = f"{source} {number}" if job.lines is None else f"{source}, line {number}"
    if request.id != number - 1:
        place = f"{place} (id {spelled(request.id)})"
    name = f"request {spelled(request.id)}"
    faults = [replace(one, where=one.where.replace(name, place, 1)) for one in error.faults]
    return RequestError.of_kind(error.kind, faults)


def partial_beside(output: Path) -> Path:
    """``out.jsonl`` -> ``out.jsonl.partial.json``."""
    return output.with_name(f"{output.name}.partial.json")


def _output(session: Session) -> Path | None:
    """The file to write, new unless resumed; None for stdout, which holds one thing."""
    named = session["output"]
    if named is not None and named != STANDARD_STREAM:
        output = Path(str(named))
        _refuse_paths(output, session.json_path, may_exist=bool(session["resume"]))
        return output
    if session["resume"]:
        raise ConfigError(
            "--resume has no output to finish",
            where="command line",
            rule="only completions in a file can be resumed",
            remedy="give --output FILE",
        )
    if session.bare_json:
        raise ConfigError(
            "--json without a path would mix the manifest with the completions",
            where="command line",
            rule="stdout holds one thing",
            remedy="give --output FILE, or --json PATH",
        )
    return None


def _refuse_paths(output: Path, manifest: Path | None, *, may_exist: bool) -> None:
    """Refuse files that exist, cannot be made, or are the same."""
    partial = partial_beside(output)
    written = {"--output": output, "the run's header beside --output": partial}
    files.refuse_clashes(written | ({} if manifest is None else {"--json": manifest}))
    if not may_exist:
        files.refuse_existing(output, "--output")
        files.refuse_existing(partial, "--output")


def _refuse_chat_without_template(resolved: ResolvedModel, tokenizer: Tokenizer | None) -> None:
    if tokenizer is None or read_chat_template(resolved.tokenizer, {}) is None:
        raise ConfigError(
            f"the model {resolved.location.name} has no chat template",
            where="option chat",
            rule="--chat needs a tokenizer, and chat_template.jinja or chat_template in "
            "tokenizer_config.json",
            remedy="leave out --chat, and give prompts as the model was trained on them",
        )


def _no_input() -> ConfigError:
    return ConfigError(
        "there is nothing to complete",
        where="command line",
        rule="requests come from --input, from --prompt, or through a pipe",
        remedy='give --input FILE or --prompt "..."; --input - also reads a terminal',
    )


def _two_inputs() -> ConfigError:
    return ConfigError(
        "--input and --prompt exclude each other",
        where="command line",
        rule="requests come from one place",
        remedy="give one of them",
    )


def _texts(value: object) -> tuple[str, ...]:
    assert isinstance(value, tuple)
    return value
