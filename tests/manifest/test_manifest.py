"""One header for every command, written once, read back whole."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pagedctl.errors import ConfigError
from pagedctl.manifest.reader import read_manifest
from pagedctl.manifest.schema import (
    DeviceInfo,
    Imported,
    Manifest,
    MemoryTerm,
    ModelInfo,
    NumericsInfo,
    SwitchInfo,
    ToolInfo,
    Verdict,
    WorkloadInfo,
)
from pagedctl.manifest.writer import ManifestBuilder, ManifestTarget

NOW = datetime(2026, 12, 1, 9, 30, tzinfo=UTC)
HEADER = [
    "schema", "command", "argv", "status", "verdict", "created_utc", "wall_s", "tool", "versions",
    "devices", "env", "model", "config", "config_origin", "numerics", "workload", "memory",
    "metrics", "samples", "files", "warnings", "imported",
]  # fmt: skip
COMMANDS = [
    "generate", "score", "bench", "compare", "plan", "probe", "parity", "invariance", "align",
    "validate", "profile", "env", "models list", "models inspect", "serve",
]  # fmt: skip


def builder(path: Path, command: str = "bench") -> ManifestBuilder:
    clock = iter([100.0, 101.5])
    return ManifestBuilder(
        command=command,
        argv=[command, "--seed", "3"],
        target=ManifestTarget(path=path),
        now=lambda: NOW,
        monotonic=lambda: next(clock),
    )


def fill(build: ManifestBuilder, folder: Path) -> None:
    """Every section, with values that a run has."""
    source = folder / "prompts.jsonl"
    source.write_bytes(b'{"id": 1}\n')
    build.tool = ToolInfo(version="0.1.0", commit="1f2e3d4", dirty=False)
    build.versions = {"python": "3.12.3", "nccl": None, "nccl_reason": "torch was not imported"}
    build.devices = (
        DeviceInfo(rank=0, name="NVIDIA A10G", capability="8.6", memory_total_bytes=23687331840),
    )
    build.env = {"NCCL_PROTO": "Simple"}
    build.model = ModelInfo(
        name="qwen3-8b",
        source="Qwen/Qwen3-8B@abc",
        digest="sha256:00",
        dtype="bfloat16",
        parameters=8190735360,
        eos_token_ids={"151645": ("config.json", "generation_config.json")},
    )
    build.config = {"tp": 4, "numerics": "fast", "max_model_len": 40960, "seed": 3}
    build.config_origin = {"tp": "flag", "max_model_len": "derived: model positions"}
    build.numerics = NumericsInfo(
        contract="fast",
        bitwise=False,
        eligible_by=None,
        verified=True,
        switches={"deterministic_kernels": SwitchInfo(value=False, set_by="contract")},
        leaves={"attention": "triton.paged_fixed_split"},
        routes=None,
        pins={"NCCL_ALGO": None},
        arithmetic_id="a1b2",
    )
    build.workload = WorkloadInfo(spec="decode:requests=64", seed=3, sha256=None)
    build.memory = (
        MemoryTerm(term="weights", rank=0, planned_bytes=4, measured_bytes=None, source="derived"),
    )
    build.metrics = {"wall_s": 37.4, "ttft_ms": {"p50": 805.1}}
    build.samples = {"wall_s": [37.4, 37.5]}
    build.add_file("input", source)
    build.warn("tied_head", where="lm_head.weight", text="differs from the embedding")
    build.imported = Imported(
        tool="vllm bench throughput", version="0.26.0", path="v.json", sha256="00", object={"a": 1}
    )


def written(folder: Path) -> tuple[Path, dict[str, Any]]:
    path = folder / "m.json"
    build = builder(path)
    fill(build, folder)
    build.close_complete(Verdict(holds=True, text="n_bad 0 of 8"))
    found = json.loads(path.read_bytes())
    assert isinstance(found, dict)
    return path, found


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_writes_the_same_header_in_the_same_order(
    tmp_path: Path, command: str
) -> None:
    """vllm-project/vllm#58100: a result file did not name the model it was about."""
    path = tmp_path / "m.json"
    build = builder(path, command)
    build.close_complete()
    found = json.loads(path.read_bytes())
    assert list(found) == HEADER
    assert found["schema"] == "pagedctl.manifest/1"
    assert found["command"] == command


def test_a_result_names_model_digest_dtype_tp_contract_versions_seed_and_env(
    tmp_path: Path,
) -> None:
    """vllm-project/vllm#58100: what a reader needs to tell two results apart."""
    _, found = written(tmp_path)
    assert list(found) == HEADER
    assert found["model"] == {
        "name": "qwen3-8b",
        "source": "Qwen/Qwen3-8B@abc",
        "digest": "sha256:00",
        "dtype": "bfloat16",
        "parameters": 8190735360,
        "eos_token_ids": {"151645": ["config.json", "generation_config.json"]},
    }
    assert list(found["numerics"])[:5] == [
        "contract", "bitwise", "eligible_by", "verified", "switches",
    ]  # fmt: skip
    assert found["numerics"]["switches"] == {
        "deterministic_kernels": {"value": False, "set_by": "contract"}
    }
    assert found["config"]["tp"] == 4
    assert found["config"]["seed"] == 3
    assert found["env"] == {"NCCL_PROTO": "Simple"}
    assert found["versions"]["nccl"] is None
    assert found["tool"] == {"version": "0.1.0", "commit": "1f2e3d4", "dirty": False}
    assert found["verdict"] == {"holds": True, "text": "n_bad 0 of 8"}
    assert found["warnings"] == [
        {"code": "tied_head", "where": "lm_head.weight", "text": "differs from the embedding"}
    ]
    (entry,) = found["files"]
    assert list(entry) == ["role", "path", "sha256", "bytes"]
    assert entry["bytes"] == 10
    assert found["created_utc"] == "2026-12-01T09:30:00Z"
    assert found["wall_s"] == 1.5
    assert found["argv"] == ["bench", "--seed", "3"]


def test_what_was_written_is_read_back_equal(tmp_path: Path) -> None:
    path, found = written(tmp_path)
    view = read_manifest(path)
    assert view.raw == found
    assert view.manifest.to_json_object() == found
    assert view.extra == {}
    assert view.manifest.model is not None
    assert view.manifest.model.eos_token_ids["151645"] == ("config.json", "generation_config.json")


def test_a_metric_that_is_not_finite_is_null_with_its_reason(tmp_path: Path) -> None:
    """vllm-project/vllm#19661: NaN in a result made the file unreadable."""
    path = tmp_path / "m.json"
    build = builder(path)
    build.metrics = {"ttft_ms": {"p50": math.nan}}
    build.close_complete()
    assert read_manifest(path).manifest.metrics == {"ttft_ms": {"p50": None, "p50_reason": "NaN"}}


def test_unknown_keys_are_kept_at_every_level(tmp_path: Path) -> None:
    """vllm-project/vllm#32667, #41367: fields come and go between versions."""
    path, found = written(tmp_path)
    found["start_times"] = [0.5]
    found["model"]["licence"] = "apache-2.0"
    path.write_text(json.dumps(found))
    view = read_manifest(path)
    assert view.extra == {"start_times": [0.5]}
    assert view.raw == found


@pytest.mark.parametrize("key", [key for key in HEADER if key != "schema"])
def test_every_missing_key_is_named(tmp_path: Path, key: str) -> None:
    path, found = written(tmp_path)
    del found[key]
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError) as caught:
        read_manifest(path)
    assert caught.value.what == f"key '{key}' is missing"
    assert str(path) in caught.value.where


def test_all_faults_of_a_file_are_reported_together_with_their_paths(tmp_path: Path) -> None:
    path, found = written(tmp_path)
    found["memory"][0]["sourc"] = found["memory"][0].pop("source")
    found["devices"][0]["rank"] = True
    found["status"] = "done"
    found["argv"] = "bench"
    found["config_origin"]["tp"] = 4
    found["tool"] = None
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError) as caught:
        read_manifest(path)
    told = {fault.where.rpartition(", key ")[2]: fault for fault in caught.value.faults}
    assert set(told) == {
        "memory[0].source", "devices[0].rank", "status", "argv", "config_origin.tp", "tool",
    }  # fmt: skip
    assert "'sourc'" in told["memory[0].source"].remedy
    assert "complete, interrupted, failed" in told["status"].rule


def test_an_error_must_stand_with_status_failed(tmp_path: Path) -> None:
    path, found = written(tmp_path)
    found["status"] = "failed"
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match="exactly when its status is failed"):
        read_manifest(path)
    with pytest.raises(ValueError, match="unknown status"):
        Manifest(
            command="x",
            argv=(),
            status="done",  # type: ignore[arg-type]
            created_utc="",
            wall_s=None,
            tool=ToolInfo(version="0"),
            versions={},
        )


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ("pagedctl.manifest/2", "'pagedctl.manifest/2' is of another major"),
        ("pagedctl.manifest/10", "'pagedctl.manifest/10' is of another major"),
        ("pagedctl.plan/1", "'pagedctl.plan/1' is not a manifest"),
        (1, "schema 1 is not a manifest"),
        (None, "schema None is not a manifest"),
    ],
)
def test_another_schema_is_refused_by_name(tmp_path: Path, schema: object, told: str) -> None:
    path, found = written(tmp_path)
    found["schema"] = schema
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=told):
        read_manifest(path)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "is empty"),
        (b"[]", "not a manifest"),
        (b"{}", "key 'schema' is missing"),
        (b'{"elapsed_time": 1.5}', "key 'schema' is missing"),
        (b'{"schema": "pagedctl.manifest/1", "schema": 1}', "appears twice"),
    ],
)
def test_files_that_are_no_manifest_are_refused(tmp_path: Path, data: bytes, told: str) -> None:
    path = tmp_path / "m.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=told):
        read_manifest(path)


def test_a_path_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ConfigError, match="cannot read"):
            read_manifest(path)


def test_a_manifest_with_a_bom_reads_the_same(tmp_path: Path) -> None:
    """microsoft/promptflow#4188: an editor's BOM must not change what is read."""
    path, found = written(tmp_path)
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(found).encode())
    assert read_manifest(path).raw == found
