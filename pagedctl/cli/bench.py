"""``pagedctl bench``: measure on stated work."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from pagedctl.bench.jsonl_workload import read_jsonl_workload
from pagedctl.bench.metrics import BenchResult
from pagedctl.bench.run import progress_unit, run_bench
from pagedctl.bench.workloads import Workload, fit_to_model, load_workload
from pagedctl.cli.bench_table import header, table
from pagedctl.cli.engine_sections import print_warnings, recorded_run
from pagedctl.cli.exit_codes import ExitCode
from pagedctl.cli.explain_numerics import explain_numerics
from pagedctl.cli.progress import open_progress
from pagedctl.cli.reserved import refuse_reserved
from pagedctl.cli.session import Session
from pagedctl.cli.words import count_of
from pagedctl.config.engine_config import EngineConfig
from pagedctl.config.loader import DEFAULT
from pagedctl.engine.jsonl import LineRules
from pagedctl.engine.manifest_sections import fill_from_config, fill_from_engine
from pagedctl.engine.params_check import params_of_options
from pagedctl.engine.request import Request, SamplingParams
from pagedctl.engine.request_limits import RequestLimits
from pagedctl.manifest.schema import WorkloadInfo
from pagedctl.manifest.writer import ManifestBuilder


def run(session: Session) -> ExitCode:
    """Serve the workload, show the figures; exit code 2 if a request failed."""
    if session["explain_numerics"]:
        return explain_numerics(session)
    refuse_reserved(session, "suite")
    with recorded_run(session) as builder:
        result = _bench(session, builder)
        _keep(builder, result)
        manifest = builder.close_complete()
        _warn_of_failures(session, result)
        session.show(table(result))
        session.emit(manifest)
    return ExitCode.NO_ANSWER if result.failures else ExitCode.YES


def _bench(session: Session, builder: ManifestBuilder) -> BenchResult:
    """Load the work, build the engine, measure."""
    config = EngineConfig.from_resolved(session.options)
    fill_from_config(builder, config)
    asked, prepare_s = _load_workload(session, config, builder)
    from pagedctl.engine.engine import Engine

    with Engine(config, run_seed=_integer(session, "seed"), needs_record=False) as engine:
        fill_from_engine(builder, engine)
        assert engine.config.max_model_len is not None
        workload = fit_to_model(asked, engine.spec.input_vocab_size, engine.config.max_model_len)
        _fill_workload(builder, workload, session)
        print_warnings(session, builder)
        session.show(header(engine, workload, repeats=_integer(session, "repeats")))
        with open_progress(session, "bench", unit=progress_unit(workload)) as progress:
            return run_bench(
                engine,
                workload,
                warmup=_integer(session, "warmup"),
                repeats=_integer(session, "repeats"),
                prepare_s=prepare_s,
                progress=progress.update,
                keep=partial(_keep, builder),
            )


def _keep(builder: ManifestBuilder, result: BenchResult) -> None:
    builder.metrics = dict(result.metrics)
    builder.samples = dict(result.samples)


def _load_workload(
    session: Session, config: EngineConfig, builder: ManifestBuilder
) -> tuple[Workload, float]:
    """The work, and the seconds that reading and tokenising a file took; 0 for drawn ids."""
    prepare_s = 0.0

    def read_jsonl(path: Path, defaults: SamplingParams) -> Iterable[Request]:
        nonlocal prepare_s
        builder.add_file("input", path)
        rules = _line_rules(path, defaults, config)
        started_s = time.perf_counter()
        requests = read_jsonl_workload(path, rules)
        prepare_s = time.perf_counter() - started_s
        return requests

    workload = load_workload(
        str(session["workload"]),
        defaults=params_of_options(session.options.values),
        read_jsonl=read_jsonl,
    )
    return workload, prepare_s


def _line_rules(path: Path, defaults: SamplingParams, config: EngineConfig) -> LineRules:
    """How a file's lines are read: checked against the model before its weights are loaded."""
    from pagedctl.models.locate import locate_model
    from pagedctl.models.resolve import resolve_model
    from pagedctl.models.tokenizer import load_tokenizer

    resolved = resolve_model(locate_model(config.model), dtype=config.dtype, weights="ignore")
    tokenizer = load_tokenizer(resolved.tokenizer)
    return LineRules(
        source=str(path),
        limits=RequestLimits.of(
            resolved.spec,
            config.max_model_len,
            has_tokenizer=tokenizer is not None,
            logprob_basis=str(config.contract["logprob_basis"]),
        ),
        defaults=defaults,
        keep=None,
        encoder=tokenizer,
        peer_ids=True,
    )


def _fill_workload(builder: ManifestBuilder, workload: Workload, session: Session) -> None:
    """The workload's section, and a warning for each departure from what was asked."""
    builder.workload = WorkloadInfo(
        spec=workload.spec, seed=workload.seed, sha256=workload.sha256()
    )
    for text in workload.different_work:
        builder.warn("different_work", where=f"workload {workload.name}", text=text)
    for name in workload.decides:
        if session.options.origins[name] != DEFAULT:
            text = f"{name} has no effect: the workload sets it"
            builder.warn("option_ignored", where=f"workload {workload.name}", text=text)


def _warn_of_failures(session: Session, result: BenchResult) -> None:
    if result.failures:
        first = result.failures[0]
        samples = count_of(len(result.failures), "sample")
        session.warn(f"{samples} failed; the first: {first.what} ({first.where})")


def _integer(session: Session, name: str) -> int:
    value = session[name]
    assert isinstance(value, int)
    return value
