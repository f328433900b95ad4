"""The prompts that ``pagedctl invariance --prompts`` reads, checked before weights are loaded."""

from __future__ import annotations

from pathlib import Path

from pagedctl.cli.words import count_of
from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.input_lines import InputLines
from pagedctl.engine.jsonl import LineRules, RefusedLine, read_requests
from pagedctl.engine.request import Request, SamplingParams
from pagedctl.engine.request_limits import RequestLimits
from pagedctl.errors import ConfigError, Fault
from pagedctl.manifest.writer import ManifestBuilder


def read_prompts(
    builder: ManifestBuilder, path: Path, config: EngineConfig, number: int
) -> list[Request]:
    """The first *number* requests of the file, recorded in the manifest.

    Raises ConfigError with the faults of all its lines: a proof over the rest would be one of
    other requests than the file states.
    """
    found: list[Request] = []
    faults: list[Fault] = []
    with InputLines.open(path) as lines:
        for one in read_requests(lines, _rules(path, config)):
            if isinstance(one, RefusedLine):
                faults.extend(one.error.faults)
            else:
                found.append(one)
    if faults:
        raise ConfigError.of(faults)
    if not found:
        raise ConfigError(
            f"{path} has no requests",
            where="option prompts",
            rule="a proof has at least one request",
            remedy="name a file with requests, or leave --prompts out",
        )
    builder.add_file("input", path)
    _warn(builder, path, found, number)
    return found[:number]


def _rules(path: Path, config: EngineConfig) -> LineRules:
    from pagedctl.models.locate import locate_model
    from pagedctl.models.resolve import resolve_model
    from pagedctl.models.tokenizer import load_tokenizer

    resolved = resolve_model(locate_model(config.model), dtype=config.dtype, weights="ignore")
    tokenizer = load_tokenizer(resolved.tokenizer)
    limits = RequestLimits.of(
        resolved.spec, config.max_model_len, has_tokenizer=tokenizer is not None
    )
    return LineRules(
        source=str(path),
        limits=limits,
        defaults=SamplingParams(),
        keep=None,
        encoder=tokenizer,
    )


def _warn(builder: ManifestBuilder, path: Path, found: list[Request], number: int) -> None:
    """What of the file has no effect."""
    where = f"option prompts {path}"
    if len(found) > number:
        text = f"the first {number:,} of {len(found):,} prompts are used: --requests {number}"
        builder.warn("prompts_left_out", where=where, text=text)
    sampled = sum(one.params != SamplingParams() for one in found[:number])
    if sampled:
        text = f"sampling fields of {count_of(sampled, 'line')} have no effect: the proof sets them"
        builder.warn("option_ignored", where=where, text=text)
