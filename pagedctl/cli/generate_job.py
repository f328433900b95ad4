"""What ``pagedctl generate`` was asked to do: options checked, input opened, nothing written."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from pagedctl.cli.parsing import STANDARD_STREAM
from pagedctl.cli.reserved import refuse_reserved
from pagedctl.cli.session import Session
from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.input_lines import InputLines
from pagedctl.engine.jsonl import LineRules
from pagedctl.engine.params_check import RequestLimits, params_of_options
from pagedctl.errors import ConfigError
from pagedctl.manifest import files
from pagedctl.models.locate import locate_model
from pagedctl.models.resolve import resolve_model
from pagedctl.models.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run to do. ``output`` None: stdout. ``lines`` None: the texts of ``prompts``.

    ``text_output``: completions are shown as text, for a person at a terminal.
    ``fills_terminal``: completions, text or lines, go to a terminal.
    """

    config: EngineConfig
    rules: LineRules
    tokenizer: Tokenizer | None
    lines: InputLines | None
    prompts: tuple[str, ...]
    output: Path | None
    text_output: bool
    fills_terminal: bool
    run_seed: int

    @property
    def partial(self) -> Path | None:
        """The file of the run's header while it lasts."""
        return None if self.output is None else partial_beside(self.output)


def job_of(session: Session) -> Job:
    """The job that *session*'s options describe; ConfigError or ModelError if there is none."""
    refuse_reserved(session, "resume", "explain_numerics")
    output = _output(session)
    defaults = params_of_options(session.options.values)
    config = EngineConfig.from_resolved(session.options)
    resolved = resolve_model(
        locate_model(config.model, environ=session.environ),
        dtype=config.dtype,
        weights="required" if config.random_weights is None else "ignore",
    )
    tokenizer = load_tokenizer(resolved.tokenizer)
    prompts = _texts(session["prompt"])
    if prompts and session["input"] is not None:
        raise _two_inputs()
    lines = None if prompts else _input(session)
    run_seed = session["seed"]
    assert isinstance(run_seed, int)
    fills_terminal = output is None and session.result.isatty()
    return Job(
        config=config,
        rules=LineRules(
            source="--prompt" if lines is None else lines.name,
            limits=RequestLimits.of(resolved.spec, config.max_model_len),
            defaults=defaults,
            keep=_texts(session["keep"]),
            encoder=tokenizer,
            chat=bool(session["chat"]),
        ),
        tokenizer=tokenizer,
        lines=lines,
        prompts=prompts,
        output=output,
        text_output=session["output"] is None and fills_terminal,
        fills_terminal=fills_terminal,
        run_seed=run_seed,
    )


def partial_beside(output: Path) -> Path:
    """``out.jsonl`` -> ``out.jsonl.partial.json``."""
    return output.with_name(f"{output.name}.partial.json")


def _output(session: Session) -> Path | None:
    """The file to write, which must not exist; None for stdout, which holds one thing."""
    named = session["output"]
    if named is not None and named != STANDARD_STREAM:
        output = Path(str(named))
        _refuse_paths(output, session.json_path)
        return output
    if session.bare_json:
        raise ConfigError(
            "--json without a path would mix the manifest with the completions",
            where="command line",
            rule="stdout holds one thing",
            remedy="give --output FILE, or --json PATH",
        )
    return None


def _refuse_paths(output: Path, manifest: Path | None) -> None:
    """Refuse files that exist, cannot be made, or are the same."""
    partial = partial_beside(output)
    written = {"--output": output, "the run's header beside --output": partial}
    files.refuse_clashes(written | ({} if manifest is None else {"--json": manifest}))
    files.refuse_existing(output, "--output")
    files.refuse_existing(partial, "--output")


def _input(session: Session) -> InputLines:
    """The lines of --input, else of stdin, unless that is a terminal."""
    named = session["input"]
    if named is not None and named != STANDARD_STREAM:
        return InputLines.open(Path(str(named)))
    if named is None and (sys.stdin is None or os.isatty(0)):
        raise ConfigError(
            "there is nothing to complete",
            where="command line",
            rule="requests come from --input, from --prompt, or through a pipe",
            remedy='give --input FILE or --prompt "..."; --input - also reads a terminal',
        )
    return InputLines.of_stdin()


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
