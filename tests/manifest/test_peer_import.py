"""Imports: written and read back nothing is lost; what is no result is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedctl.errors import ConfigError
from pagedctl.manifest import strict_json
from pagedctl.manifest.peer_files import read_peer_file
from tests.manifest.peer_harness import read, same, write, written_and_read
from tests.manifest.peer_samples import (
    LATENCY,
    SAMPLES,
    SERVE,
    SERVE_DETAILED,
    SGLANG_2024,
    SGLANG_2026,
)

BOM = b"\xef\xbb\xbf"


# -- imported, written, read back --------------------------------------------------------


def restored(value: object, explained: object = None) -> object:
    """A written value as it was before: nulls with a reason become the number again."""
    if isinstance(value, dict):
        reasons = {key for key in value if f"{key}_reason" in value}
        return {
            key: restored(each, value.get(f"{key}_reason"))
            for key, each in value.items()
            if not any(key == f"{name}_reason" for name in reasons)
        }
    if isinstance(value, list):
        notes = dict(note.split(": ", 1) for note in str(explained or "").split("; ") if note)
        within = {key.partition("]")[0][1:]: key.partition("]")[2] for key in notes}
        return [
            restored(each, _inner(notes, index) if str(index) in within else None)
            for index, each in enumerate(value)
        ]
    return _number_of(explained) if value is None and explained is not None else value


def _inner(notes: Mapping[str, str], index: int) -> str:
    """The notes of list element *index*, as its own reason."""
    head = f"[{index}]"
    found = {key[len(head) :]: text for key, text in notes.items() if key.startswith(head)}
    return found[""] if "" in found else "; ".join(f"{key}: {t}" for key, t in found.items())


def _number_of(explained: object) -> object:
    text = str(explained)
    beyond = "integer beyond 64 bits: "
    return int(text.removeprefix(beyond), 0) if text.startswith(beyond) else float(text)


NUMBERS = st.floats() | st.integers(-(2**70), 2**70) | st.none()
TREES = st.recursive(
    NUMBERS | st.booleans() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz", max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=150)
@given(data=st.data(), name=st.sampled_from(sorted(SAMPLES)))
def test_an_import_that_is_written_and_read_back_keeps_every_value(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, name: str
) -> None:
    """vllm-project/vllm#32667: whatever a version adds; #19661: NaN and infinities too."""
    folder = tmp_path_factory.mktemp("import")
    numbers = [key for key, value in SAMPLES[name].items() if isinstance(value, float)]
    changed = data.draw(st.dictionaries(st.sampled_from(numbers), NUMBERS, max_size=4))
    extra = data.draw(st.dictionaries(st.text("xyz", min_size=1), TREES, max_size=3))
    source = {**SAMPLES[name], **changed, **extra}
    source.pop("generated_texts", None)  # a lone surrogate is written as text
    result = read(folder, source)
    assert same(result.imported.object, source)
    manifest = written_and_read(folder, result)
    assert same(restored(manifest["imported"]["object"]), source)
    assert same(restored(manifest["metrics"]), asdict(result.metrics))
    for key in ("tool", "version", "path", "sha256"):
        assert manifest["imported"][key] == getattr(result.imported, key)


def test_a_lone_surrogate_in_a_text_does_not_cost_the_import(tmp_path: Path) -> None:
    manifest = written_and_read(tmp_path, read(tmp_path, SERVE_DETAILED))
    assert manifest["imported"]["object"]["generated_texts"][3] == "\\ud83d"


# -- refusals ----------------------------------------------------------------------------


def refusal(path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_peer_file(path)
    for fault in caught.value.faults:
        assert str(path) in fault.where
        assert fault.rule
        assert fault.remedy
    return caught.value


@pytest.mark.parametrize(
    ("data", "what", "where"),
    [
        (b"", "the file is empty", ""),
        (BOM + b"\n \n", "the file is empty", ""),
        (b"[]", "a value that is no object", ", line 1"),
        (b"NaN", "a value that is no object", ", line 1"),
        (b"{}", "no result of a tool that is known here", ", line 1"),
        (b'{"schema": "pagedctl.manifest/1"}', "no result of a tool", ", line 1"),
        (b'{"duration": 1.0, "request_throughput": 2.0}', "no result of a tool", ", line 1"),
        (b'{"elapsed_time": 1.0,\n "num_requests"', "not JSON", ", line 2, column 16"),
        (b'{"avg_latency": 1.0} tail', "not JSON", ", line 1, column 22"),
        (b'\n{"a": 1, "b": {"c": 1, "c": 2}}', "key 'c' appears twice", ", line 2 and after"),
        (b'{"a": 1e400}', "1e400 is beyond float64", ", line 1 and after"),
        (b'{"a": ' + b"9" * 5000 + b"}", "4300 digits", ", line 1 and after"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply", ", line 1 and after"),
        (b'{\n"a": "\xff"}', "byte 0xff is not UTF-8", ", line 2"),
    ],
)
def test_what_is_no_result_is_refused_with_its_place(
    tmp_path: Path, data: bytes, what: str, where: str
) -> None:
    path = tmp_path / "peer.json"
    path.write_bytes(data)
    error = refusal(path)
    assert what in error.what
    assert error.where == f"{path}{where}"


def test_all_faults_of_a_file_are_reported_together_each_once(tmp_path: Path) -> None:
    path = tmp_path / "peer.json"
    bad_serve = {**SERVE, "duration": "4.0", "completed": 2.5, "mean_ttft_ms": True, "failed": []}
    bad_latency = {**LATENCY, "percentiles": {"50": "1.25"}, "avg_latency": {}}
    bad_sglang = {**SGLANG_2026, "server_info": [], "request_rate": False, "errors": "none"}
    lines = [bad_serve, bad_latency, [1], bad_sglang, {"a": 1}]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = [(fault.where.removeprefix(f"{path}, "), fault.what) for fault in refusal(path).faults]
    assert sorted(found) == sorted(
        [
            ("line 1, key duration", "duration is '4.0'"),
            ("line 1, key completed", "completed is 2.5"),
            ("line 1, key mean_ttft_ms", "mean_ttft_ms is True"),
            ("line 1, key failed", "failed is []"),
            ("line 2, key percentiles, key 50", "50 is '1.25'"),
            ("line 2, key avg_latency", "avg_latency is {}"),
            ("line 3", "the file holds a value that is no object"),
            ("line 4, key server_info", "server_info is []"),
            ("line 4, key request_rate", "request_rate is False"),
            ("line 4, key errors", "errors is 'none'"),
            ("line 5", "the object is no result of a tool that is known here"),
        ]
    )


def test_an_object_of_two_tools_is_refused_and_both_are_named(tmp_path: Path) -> None:
    error = refusal(write(tmp_path, {**SERVE, **SGLANG_2024}))
    assert "keys of vllm bench serve and of sglang bench_serving" in error.what


def test_a_whole_float_is_a_count(tmp_path: Path) -> None:
    """A data frame on the way turns 3 into 3.0 where another row lacks the value."""
    found = read(tmp_path, {**SERVE, "completed": 3.0, "total_input_tokens": math.nan}).metrics
    assert same(found.requests_completed, 3)
    assert found.prompt_tokens is not None
    assert math.isnan(found.prompt_tokens)


def test_a_result_that_no_manifest_could_hold_is_refused_when_it_is_read(tmp_path: Path) -> None:
    def nested(levels: int) -> dict[str, object]:
        deep: object = "x"
        for _ in range(levels):
            deep = [deep]
        return {**SERVE, "deep": deep}

    limit = strict_json.MAX_DEPTH - 3  # the manifest, imported and object are around it
    written_and_read(tmp_path, read(tmp_path, nested(limit)))
    error = refusal(write(tmp_path, nested(limit + 1)))
    assert "cannot be kept in a manifest: nested deeper" in error.what


@pytest.mark.parametrize("name", ["absent.json", "."])
def test_a_path_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    assert "cannot read" in refusal(tmp_path / name).what


# -- what is not finite -----------------------------------------------------------------


def test_a_nan_of_the_source_stays_one_until_it_is_written(tmp_path: Path) -> None:
    """vllm-project/vllm#19661: SGLang's mean of no latencies is NaN, bare in the file."""
    path = write(tmp_path, {**SGLANG_2024, "mean_e2e_latency_ms": math.nan})
    assert b"NaN" in path.read_bytes()
    (result,) = read_peer_file(path)
    stats = result.metrics.e2e_ms
    assert stats is not None
    assert stats.mean is not None
    assert math.isnan(stats.mean)
    manifest = written_and_read(tmp_path, result)
    assert manifest["metrics"]["e2e_ms"]["mean"] is None
    assert manifest["metrics"]["e2e_ms"]["mean_reason"] == "NaN"
    assert manifest["imported"]["object"]["mean_e2e_latency_ms_reason"] == "NaN"
    assert manifest["metrics"]["kv_tokens"] is None
    assert "kv_tokens_reason" not in manifest["metrics"]


@pytest.mark.parametrize(
    ("value", "rate"),
    [
        (math.inf, math.inf),
        ("inf", math.inf),
        ("Infinity", math.inf),
        (None, math.inf),
        (2.5, 2.5),
        (4, 4),
        ("trace", None),
    ],
)
@pytest.mark.parametrize("sample", [SERVE, SGLANG_2024], ids=["vllm", "sglang"])
def test_an_infinite_request_rate_is_read_in_every_spelling_and_written_in_one(
    tmp_path: Path, sample: dict[str, Any], value: object, rate: float | None
) -> None:
    """bentoml/llm-optimizer#21 and SGLang's bench_serving: Infinity, "inf" and null."""
    result = read(tmp_path, {**sample, "request_rate": value})
    assert result.request_rate == rate
    config = written_and_read(tmp_path, result)["config"]
    infinite = rate is not None and math.isinf(rate)
    assert config["request_rate"] == (None if infinite else rate)
    assert config.get("request_rate_reason") == ("Infinity" if infinite else None)
