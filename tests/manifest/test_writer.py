"""A manifest is written exactly once, whatever ends its command, and never over a file."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pagedctl.errors import ConfigError, Fault
from pagedctl.manifest import writer
from pagedctl.manifest.environment import run_facts
from pagedctl.manifest.reader import read_manifest
from pagedctl.manifest.schema import Verdict

NOW = datetime(2026, 12, 1, 9, 30, tzinfo=UTC)


def builder(path: Path | None) -> writer.ManifestBuilder:
    target = None if path is None else writer.ManifestTarget(path=path)
    return writer.ManifestBuilder(command="bench", argv=["bench"], target=target)


# -- the builder -------------------------------------------------------------------------


def test_a_refused_run_leaves_a_failed_manifest_with_all_its_faults(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    fault = Fault(what="w", where="x", rule="r", remedy="m")
    with pytest.raises(ConfigError), builder(path):
        raise ConfigError.of([fault, fault])
    found = json.loads(path.read_bytes())
    assert list(found)[3:7] == ["status", "verdict", "error", "created_utc"]
    assert found["status"] == "failed"
    assert found["error"] == {**fault.as_dict(), "faults": [fault.as_dict()] * 2}
    assert read_manifest(path).manifest.error == found["error"]


def test_a_fault_of_ours_leaves_a_failed_manifest_and_travels_on(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    with pytest.raises(ZeroDivisionError), builder(path):
        raise ZeroDivisionError("by zero")
    error = read_manifest(path).manifest.error
    assert error is not None
    assert error["what"] == "ZeroDivisionError: by zero"
    assert set(error) == {"what", "where", "rule", "remedy"}


@pytest.mark.parametrize("first", [ZeroDivisionError(), KeyboardInterrupt()])
def test_the_first_error_wins_over_a_manifest_that_cannot_be_written(
    tmp_path: Path, first: BaseException
) -> None:
    build = builder(tmp_path / "gone" / "m.json")
    with pytest.raises(type(first)), build:
        raise first
    assert build.closed is None
    assert build.unwritten is not None
    assert "gone does not exist" in build.unwritten.what


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupted_run_keeps_what_it_had(tmp_path: Path, stop: BaseException) -> None:
    path = tmp_path / "m.json"
    build = builder(path)
    build.metrics["output_tokens"] = 12
    with pytest.raises(type(stop)), build:
        raise stop
    manifest = read_manifest(path).manifest
    assert manifest.status == "interrupted"
    assert manifest.metrics == {"output_tokens": 12}
    assert manifest.error is None


def test_the_end_of_the_block_closes_as_complete_and_only_once(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    build = builder(path)
    with build:
        build.verdict = Verdict(holds=False, text="does not fit")
    assert read_manifest(path).manifest.verdict == Verdict(holds=False, text="does not fit")
    with pytest.raises(RuntimeError, match="closed as complete"):
        build.close_interrupted()
    manifest = build.closed
    assert manifest is not None
    assert manifest.status == "complete"


def test_a_snapshot_is_not_changed_by_what_comes_later() -> None:
    build = builder(None)
    before = build.snapshot("interrupted")
    build.metrics["x"] = 1
    build.warn("c", where="w", text="t")
    assert before.metrics == {}
    assert before.warnings == ()


def test_a_builder_is_open_until_it_is_closed(tmp_path: Path) -> None:
    build = builder(tmp_path / "m.json")
    assert build.closed is None
    assert build.close_complete() is build.closed


def test_without_a_target_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    manifest = builder(None).close_complete()
    assert manifest.status == "complete"
    assert list(tmp_path.iterdir()) == []


def test_the_facts_of_this_machine_fit_a_manifest(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    build = builder(path)
    for name, value in run_facts({"OMP_NUM_THREADS": "2"}).manifest_sections().items():
        setattr(build, name, value)
    build.close_complete()
    manifest = read_manifest(path).manifest
    assert manifest.env == {"OMP_NUM_THREADS": "2"}
    assert manifest.versions["python"]


# -- where it lies -----------------------------------------------------------------------


def target(tmp_path: Path, json_path: Path | None, output: Path | None) -> writer.ManifestTarget:
    return writer.choose_target(
        command="models inspect",
        json_path=json_path,
        output=output,
        runs_dir=tmp_path / "runs",
        now=NOW,
    )


def test_json_path_beats_output_beats_the_runs_folder(tmp_path: Path) -> None:
    json_path, output = tmp_path / "m.json", tmp_path / "out.jsonl"
    assert target(tmp_path, json_path, output).path == json_path
    assert target(tmp_path, None, output).path == tmp_path / "out.jsonl.manifest.json"
    names = {target(tmp_path, None, None).path.name for _ in range(50)}
    assert len(names) >= 49
    for name in names:
        assert name.startswith("20261201T093000Z-models-inspect-")
        assert len(name) == len("20261201T093000Z-models-inspect-1f2e3d.json")


def test_only_the_runs_folder_is_made(tmp_path: Path) -> None:
    chosen = target(tmp_path, None, None)
    build = writer.ManifestBuilder(command="bench", argv=[], target=chosen)
    build.close_complete()
    assert read_manifest(chosen.path).manifest.command == "bench"
    with pytest.raises(ConfigError, match="does not exist"):
        target(tmp_path, tmp_path / "no" / "m.json", None)


@pytest.mark.parametrize("option", ["--json", "--output"])
def test_a_manifest_path_that_exists_is_refused_before_work(tmp_path: Path, option: str) -> None:
    """`compare --json A B` reads A as the path to write: A must survive that."""
    kept = tmp_path / ("a.json" if option == "--json" else "out.jsonl.manifest.json")
    kept.write_text("a result")
    json_path = kept if option == "--json" else None
    with pytest.raises(ConfigError) as caught:
        target(tmp_path, json_path, tmp_path / "out.jsonl")
    assert caught.value.where == option
    assert kept.read_text() == "a result"


def test_a_file_of_the_run_that_is_gone_is_a_refusal(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        builder(None).add_file("input", tmp_path / "gone")
