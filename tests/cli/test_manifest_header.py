"""One header for every command: what was run, of which model, under which contract, where."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pagedctl.cli import engine_sections
from pagedctl.cli.main import BODIES
from pagedctl.config.surface import COMMANDS, Command
from pagedctl.manifest.schema import Manifest
from pagedctl.models.locate import EMBEDDED_FOLDER
from tests.cli.every_command import (
    SEED,
    Folder,
    engine_commands,
    folder_of_commands,
    runs_an_engine,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HEADER = [each.name for each in fields(Manifest) if each.name != "error"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    environ = {
        "HF_HOME": str(tmp_path / "hf"),
        "NCCL_PROTO": "Simple",
        "NCCL_SECRET_KEY": "hidden",
    }
    with folder_of_commands(tmp_path, monkeypatch, environ) as found:
        yield found


def check_machine(found: dict[str, Any]) -> None:
    """The tool, versions and environment; a null says why."""
    assert found["tool"]["version"]
    assert found["tool"]["commit"] or found["tool"]["commit_reason"] != "not looked up"
    assert found["versions"].get("python")
    for name, version in found["versions"].items():
        assert version or found["versions"][f"{name}_reason"], name
    assert {"torch", "triton", "nccl", "driver", "numpy"} <= found["versions"].keys()
    assert found["env"].get("NCCL_PROTO") == "Simple"
    assert "NCCL_SECRET_KEY" not in found["env"]


def check_model(found: dict[str, Any]) -> None:
    model = found["model"]
    assert (model["name"], model["source"]) == ("embedded", "embedded in pagedctl")
    assert model["digest"].startswith("sha256:")
    assert model["dtype"] == "float32"
    assert model["parameters"] > 0
    assert model["eos_token_ids"]


def check_run(found: dict[str, Any], command: Command) -> None:
    """What a run of an engine adds: model, contract, configuration and seed."""
    check_model(found)
    config, numerics = found["config"], found["numerics"]
    assert config["tp"] == 1
    assert config.keys() == found["config_origin"].keys()
    unsaid = command.all_options().keys() - config.keys()
    assert unsaid <= {"plan", "json", "quiet", "progress"}
    assert numerics["contract"] == config["numerics"]
    assert (numerics["verified"], numerics["eligible_by"]) == (True, "profile qwen3 float32 cpu")
    assert numerics["arithmetic_id"]
    assert numerics["leaves"]
    for name, switch in numerics["switches"].items():
        assert switch.keys() >= {"value", "set_by"}, name
    assert found["versions"]["torch"]
    assert [one["rank"] for one in found["devices"]] == [0]
    if "seed" in command.all_options():
        assert config["seed"] == SEED
        assert found["workload"] is not None


@pytest.mark.parametrize("name", BODIES)
def test_every_command_writes_the_same_header(folder: Folder, name: str) -> None:
    """vllm-project/vllm#58100: a result must name its model, and what else made it."""
    command = COMMANDS[name]
    found = folder.manifest(command)
    assert list(found) == HEADER
    assert (found["command"], found["status"]) == (name, "complete")
    assert found["argv"][: len(name.split())] == name.split()
    check_machine(found)
    if "model" in command.arguments:
        check_model(found)
        assert found["config"]["tp"] == 1
    if runs_an_engine(command):
        check_run(found, command)


@pytest.mark.parametrize("name", engine_commands())
def test_a_run_that_failed_writes_the_same_header(folder: Folder, name: str) -> None:
    """vllm-project/vllm#58100: a failure is a result too."""
    found = folder.manifest(COMMANDS[name], code=2, kv_cache_memory_bytes="1")
    assert [key for key in found if key != "error"] == HEADER
    assert (found["command"], found["status"]) == (name, "failed")
    assert found["error"]["what"]
    check_machine(found)
    assert (found["config"]["model"], found["config"]["tp"]) == ("embedded", 1)
    assert found["numerics"]["contract"] == found["config"]["numerics"]


def test_a_header_that_nobody_filled_is_seen(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power of the two tests above."""
    reached = []
    monkeypatch.setattr(engine_sections, "fill_header", lambda *given: reached.append(given))
    found = folder.manifest(COMMANDS["bench"])
    assert reached
    assert list(found) == HEADER
    with pytest.raises(AssertionError):
        check_machine(found)


def test_a_model_of_the_cache_is_named_with_its_revision(folder: Folder) -> None:
    """vllm-project/vllm#58100: a name alone does not say which weights."""
    snapshot = folder.path / "hf" / "hub" / "models--org--Tiny" / "snapshots" / COMMIT
    shutil.copytree(EMBEDDED_FOLDER, snapshot)
    words = ("--max-tokens=1", "--prompt=Tom", "--kv-cache-memory-bytes=16MiB", "--quiet")
    path = folder.path / "m.json"
    digests = set()
    for eos in (None, 5):
        if eos is not None:
            config = json.loads((snapshot / "config.json").read_text())
            (snapshot / "config.json").write_text(json.dumps({**config, "eos_token_id": eos}))
        model = f"--model=org/Tiny@{COMMIT}"
        assert folder.run("generate", model, *words, "--json", str(path)) == 0
        found = json.loads(path.read_bytes())["model"]
        assert found["source"] == f"org/Tiny@{COMMIT}"
        digests.add(found["digest"])
        path.unlink()
    assert len(digests) == 2
