"""Other tools' result files: by presence of keys, nothing lost, nothing invented."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedctl.bench.run import run_bench
from pagedctl.bench.timing import Distribution
from pagedctl.bench.workloads import load_workload
from pagedctl.engine.request import SamplingParams
from pagedctl.errors import ConfigError
from pagedctl.manifest import peer_formats
from pagedctl.manifest.peer_files import read_peer_file
from pagedctl.manifest.peer_object import PeerObject
from pagedctl.manifest.peer_result import LatencyStats, PeerMetrics
from tests.bench.fake_engine import Clock, FakeEngine
from tests.manifest.peer_harness import read, same
from tests.manifest.peer_samples import (
    EXPECTED,
    LATENCY,
    POOLING,
    SAMPLES,
    SERVE,
    SERVE_2024,
    SERVE_DETAILED,
    SGLANG_2024,
    SGLANG_2026,
    THROUGHPUT,
)

BOM = b"\xef\xbb\xbf"


def expected(name: str) -> dict[str, Any]:
    """Every metric of the sample: what EXPECTED has, None for all others."""
    nothing = asdict(PeerMetrics())
    no_statistics = asdict(LatencyStats())
    found = {
        key: {**no_statistics, **value} if isinstance(value, dict) else value
        for key, value in EXPECTED[name].items()
    }
    return {**nothing, **found}


# -- what is read ------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_what_a_file_has_is_read_and_what_it_lacks_is_none(tmp_path: Path, name: str) -> None:
    """vllm-project/vllm#32667, #41367: std_latency, failed, start_times come and go."""
    found = asdict(read(tmp_path, SAMPLES[name]).metrics)
    assert same(found, expected(name))


@pytest.mark.parametrize("name", SAMPLES)
def test_the_source_is_kept_whole_with_its_tool(tmp_path: Path, name: str) -> None:
    result = read(tmp_path, SAMPLES[name])
    assert same(result.imported.object, SAMPLES[name])
    assert result.imported.path == str(tmp_path / "peer.json")
    assert len(result.imported.sha256) == 64
    tools = {
        "throughput": "vllm bench throughput",
        "latency": "vllm bench latency",
        "serve": "vllm bench serve",
        "pooling": "vllm bench serve",
        "sglang": "sglang bench_serving",
    }
    assert result.imported.tool == tools[name.split()[0]]


TELL_THE_TOOL = {
    "elapsed_time", "tokens_per_second", "avg_latency", "duration", "request_throughput",
}  # fmt: skip
"""Without one of these, no tool's file is left."""


@pytest.mark.parametrize("absent", ["removed", "null"])
@pytest.mark.parametrize("name", SAMPLES)
def test_a_key_that_goes_takes_its_own_metrics_along_and_no_other(
    tmp_path: Path, name: str, absent: str
) -> None:
    """vllm-project/vllm#32667, #41367: absent and null are both None, never 0."""
    whole = flat(asdict(read(tmp_path, SAMPLES[name]).metrics))
    gone: set[str] = set()
    for key in SAMPLES[name]:
        if absent == "removed" and key in TELL_THE_TOOL:
            continue
        value = {**SAMPLES[name], key: None}
        if absent == "removed":
            del value[key]
        left = flat(asdict(read(tmp_path, value).metrics))
        for metric, before in whole.items():
            assert left[metric] is None or same(left[metric], before), (key, metric)
            if left[metric] is None and before is not None:
                gone.add(metric)
    kept = {metric for metric, value in whole.items() if value is not None} - gone
    of_the_tool = {"wall_s", "requests_per_s", "total_tokens_per_s", "e2e_ms.mean"}
    assert kept <= (of_the_tool if absent == "removed" else {"total_tokens_per_s"})


def flat(metrics: Mapping[str, Any]) -> dict[str, object]:
    """``ttft_ms.mean`` and the like; a latency that is None has each statistic None."""
    found: dict[str, object] = {}
    for name, value in metrics.items():
        if name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
            stats = value or asdict(LatencyStats())
            found |= {f"{name}.{statistic}": each for statistic, each in stats.items()}
        else:
            found[name] = value
    return found


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(sorted(SAMPLES)),
    extra=st.dictionaries(
        st.text(max_size=12), st.none() | st.integers() | st.text() | st.lists(st.floats())
    ),
)
def test_a_key_that_is_not_known_is_kept_and_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, name: str, extra: dict[str, object]
) -> None:
    """vllm-project/vllm#41367: later versions add keys."""
    folder = tmp_path_factory.mktemp("peer")
    known = SAMPLES[name].keys() | {"version", "failed", "errors", "request_rate"}
    value = {**SAMPLES[name], **{f"x{key}": each for key, each in extra.items()}}
    assert not (value.keys() - SAMPLES[name].keys()) & known
    result = read(folder, value)
    assert same(asdict(result.metrics), expected(name))
    assert same(result.imported.object, value)


def test_failures_are_counted_only_where_the_file_tells(tmp_path: Path) -> None:
    assert read(tmp_path, SERVE).metrics.requests_failed is None
    assert read(tmp_path, {**SERVE, "failed": 0}).metrics.requests_failed == 0
    assert read(tmp_path, {**SERVE, "errors": ["", "", ""]}).metrics.requests_failed == 0
    both = {**SERVE_DETAILED, "failed": 2}
    assert read(tmp_path, both).metrics.requests_failed == 2


def test_an_output_rate_is_never_made_from_a_total(tmp_path: Path) -> None:
    """vLLM's ``tokens_per_second`` counts prompts: taken for output it flatters by half."""
    assert read(tmp_path, THROUGHPUT).metrics.output_tokens_per_s is None
    pooling = read(tmp_path, {**POOLING, "input_throughput": 20.0}).metrics
    assert pooling.output_tokens_per_s is None
    assert pooling.total_tokens_per_s == 50.0


ZERO_TIMES = {
    f"{statistic}_{name}_ms": 0.0
    for name in ("ttft", "tpot", "itl", "e2el")
    for statistic in ("mean", "median", "std", "p99")
}


def test_the_zeros_of_an_empty_list_are_no_latencies(tmp_path: Path) -> None:
    """Both tools write 0 ms where no request completed, or the server does not stream."""
    idle = {**SERVE, "completed": 0, "request_throughput": 0.0, **ZERO_TIMES}
    metrics = read(tmp_path, idle).metrics
    assert (metrics.ttft_ms, metrics.tpot_ms, metrics.itl_ms, metrics.e2e_ms) == (None,) * 4
    assert (metrics.requests_completed, metrics.requests_per_s) == (0, 0.0)


def test_a_rate_that_the_file_does_not_state_is_none(tmp_path: Path) -> None:
    without = {key: value for key, value in SERVE.items() if key != "request_rate"}
    assert read(tmp_path, without).request_rate is None
    assert read(tmp_path, {**SERVE, "ramp_up_strategy": "linear"}).request_rate is None
    assert read(tmp_path, {**SERVE, "ramp_up_strategy": None}).request_rate == math.inf
    assert read(tmp_path, THROUGHPUT).request_rate is None


@pytest.mark.parametrize(
    ("value", "version", "model"),
    [
        (SERVE, None, "Qwen/Qwen3-8B"),
        (SERVE_DETAILED, "0.11.0", "Qwen/Qwen3-8B"),
        ({**THROUGHPUT, "vllm_version": "0.12.0", "model_id": "org/m"}, "0.12.0", "org/m"),
        (LATENCY, None, None),
        (SGLANG_2024, None, None),
        (SGLANG_2026, "0.5.6", "Qwen/Qwen3-8B"),
        ({**SGLANG_2026, "server_info": None}, None, None),
        ({**SERVE, "version": 11}, None, "Qwen/Qwen3-8B"),
    ],
)
def test_version_and_model_are_what_the_file_says_of_them(
    tmp_path: Path, value: dict[str, Any], version: str | None, model: str | None
) -> None:
    result = read(tmp_path, value)
    assert (result.imported.version, result.model) == (version, model)


def test_a_format_is_known_by_its_results_not_by_backend_or_metadata(tmp_path: Path) -> None:
    """Each tool measures the other's server, and vLLM's ``--metadata`` takes any key."""
    labelled = {"dataset_name": "sharegpt", "concurrency": "8", "percentiles": "99", "tp": "2"}
    vllm = read(tmp_path, {**SERVE, "backend": "sglang", **labelled})
    assert vllm.imported.tool == "vllm bench serve"
    sglang = read(tmp_path, {**SGLANG_2026, "backend": "vllm", "label": "x", "version": "0.11"})
    assert sglang.imported.tool == "sglang bench_serving"
    assert sglang.imported.version == "0.5.6"


def test_names_are_those_of_our_own_bench() -> None:
    workload = load_workload(
        "decode:requests=2,prompt=3,output=4",
        defaults=SamplingParams(),
        read_jsonl=lambda path, defaults: [],
    )
    engine = FakeEngine(Clock())
    ours = run_bench(engine, workload, warmup=0, repeats=1, clock=engine.clock).metrics  # type: ignore[arg-type]
    theirs = [each.name for each in fields(PeerMetrics)]
    assert theirs == [name for name in ours if name in theirs]
    assert set(ours) - set(theirs) == {"running_p50", "running_max", "kv_used_max"}
    names = [each.name for each in fields(LatencyStats)]
    assert names == [each.name for each in fields(Distribution)]
    for form in peer_formats.FORMATS:
        assert form.differs.keys() <= set(theirs)


# -- several runs, and how they are written ----------------------------------------------


def test_a_file_of_several_runs_gives_each_with_its_line(tmp_path: Path) -> None:
    """``vllm bench serve --append-result`` and SGLang append; other results are indented."""
    path = tmp_path / "runs.jsonl"
    text = f"{json.dumps(LATENCY, indent=4)}\n\n{json.dumps(SERVE)}\r\n{json.dumps(SGLANG_2024)}\n"
    path.write_text(text, newline="")
    results = read_peer_file(path)
    assert [one.imported.tool for one in results] == [
        "vllm bench latency",
        "vllm bench serve",
        "sglang bench_serving",
    ]
    second = json.dumps(LATENCY, indent=4).count("\n") + 3
    assert [one.line for one in results] == [1, second, second + 1]
    assert len({one.imported.sha256 for one in results}) == 1


def test_a_bom_is_dropped_at_the_start_of_the_file_only(tmp_path: Path) -> None:
    """microsoft/promptflow#4188, #3670, huggingface/datasets#8241: same result as without."""
    line = json.dumps(SGLANG_2024).encode()
    path = tmp_path / "peer.jsonl"
    path.write_bytes(BOM + line + b"\n" + line)
    first, second = read_peer_file(path)
    assert first.metrics == second.metrics
    path.write_bytes(line + b"\n" + BOM + line)
    with pytest.raises(ConfigError) as caught:
        read_peer_file(path)
    assert "byte order mark" in caught.value.what
    assert caught.value.where == f"{path}, line 2, column 1"


# -- power -------------------------------------------------------------------------------


class Site:
    """Counts how often a mutated site was reached."""

    def __init__(self) -> None:
        self.reached = 0


def missing_is_zero(patch: pytest.MonkeyPatch, site: Site) -> None:
    number = PeerObject.number

    def mutant(self: PeerObject, key: str) -> float | None:
        value = number(self, key)
        site.reached += value is None
        return 0 if value is None else value

    patch.setattr(PeerObject, "number", mutant)


def null_rate_is_unknown(patch: pytest.MonkeyPatch, site: Site) -> None:
    request_rate = PeerObject.request_rate

    def mutant(self: PeerObject) -> float | None:
        null = self.values.get("request_rate", "absent") is None
        site.reached += null
        return None if null else request_rate(self)

    patch.setattr(PeerObject, "request_rate", mutant)


def output_rate_from_total(patch: pytest.MonkeyPatch, site: Site) -> None:
    number = PeerObject.number

    def mutant(self: PeerObject, key: str) -> float | None:
        total = key == "output_throughput" and key not in self.values
        site.reached += total
        return number(self, "total_token_throughput" if total else key)

    patch.setattr(PeerObject, "number", mutant)


def decided_by_backend(patch: pytest.MonkeyPatch, site: Site) -> None:
    def fits(self: peer_formats.PeerFormat, values: Mapping[str, object]) -> bool:
        site.reached += 1
        backend = "sglang" if values["backend"] == "sglang" else "vllm"
        return self.tool in (f"{backend} bench serve", f"{backend} bench_serving")

    patch.setattr(peer_formats.PeerFormat, "fits", fits)


def table_oracle(folder: Path) -> None:
    for name in SAMPLES:
        test_what_a_file_has_is_read_and_what_it_lacks_is_none(folder, name)


def rate_oracle(folder: Path) -> None:
    assert read(folder, {**SERVE, "request_rate": None}).request_rate == math.inf
    assert read(folder, {**SERVE_2024, "request_rate": 2.5}).request_rate == 2.5


Mutant = Callable[[pytest.MonkeyPatch, Site], None]


@pytest.mark.parametrize(
    ("mutant", "oracle"),
    [
        (missing_is_zero, table_oracle),
        (null_rate_is_unknown, rate_oracle),
        (output_rate_from_total, table_oracle),
        (decided_by_backend, test_a_format_is_known_by_its_results_not_by_backend_or_metadata),
    ],
)
def test_a_mutant_is_caught_beside_a_control_that_passes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Mutant,
    oracle: Callable[[Path], None],
) -> None:
    oracle(tmp_path)
    site = Site()
    mutant(monkeypatch, site)
    with pytest.raises((AssertionError, ConfigError)):
        oracle(tmp_path)
    assert site.reached > 0
