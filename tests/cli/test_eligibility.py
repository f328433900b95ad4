"""Profiles, records and ``--unverified`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.engine import Engine
from pagedctl.engine.verification import record_of, write_record
from pagedctl.manifest.schema import FileEntry
from tests.cli.generate_harness import SMALL, Generate
from tests.conftest import Cli, python_path

PROMPT = ("--prompt", "Tom has 3", "--max-tokens", "3", *SMALL)
ALIGNED = ("--numerics", "rl-bitwise")
MANIFEST = FileEntry(role="manifest", path="m.json", sha256="ab" * 32, bytes=9)

PLUGIN = """
from dataclasses import replace
from pagedctl_kernels.ops.silu_mul.spec import LEAVES
from pagedctl.plugins import Plugin

house = next(leaf for leaf in LEAVES if leaf.capability.kind == "cpu")
plugin = Plugin(leaves=(replace(house, name="acme.silu_mul", priority=house.priority + 100),))
"""


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """The environment in which a package with a leaf of its own is installed."""
    folder = tmp_path / "site"
    info = folder / "acme-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pagedctl.plugins]\nacme = acme_leaf:plugin\n")
    (folder / "acme_leaf.py").write_text(PLUGIN)
    return {"PYTHONPATH": python_path(folder)}


def numerics(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_bytes())["numerics"]
    return found


def warnings(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("warning: ")]


def earn(home: Path, *commands: Any, contract: str = "rl-bitwise") -> list[Path]:
    """Records of the embedded model under *contract*, in *home*."""
    config = EngineConfig(
        model="embedded", numerics=contract, kv_cache_memory_bytes=1 << 24, max_model_len=64
    )
    environ = {"PAGEDCTL_HOME": str(home)}
    with Engine(config, needs_record=False) as engine:
        model = engine.parts.model
        records = [
            record_of(model, command=one, cases=("alone",), manifest=MANIFEST) for one in commands
        ]
    return [write_record(one, None, environ) for one in records]


def test_the_embedded_model_is_covered_by_its_profile(generate: Generate) -> None:
    """The README's first run has no warning, asked for or not."""
    for number, words in enumerate(((), ("--numerics", "invariant"), ("--unverified",))):
        done = generate(*PROMPT, *words, "--json", f"{number}.json")
        assert done.code == 0
        assert warnings(done.err) == []
        found = numerics(done.folder / f"{number}.json")
        assert (found["verified"], found["eligible_by"]) == (True, "profile qwen3 float32 cpu")


def test_a_contract_without_record_is_refused_with_the_command_that_earns_it(
    generate: Generate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PAGEDCTL_HOME", str(tmp_path / "home"))
    done = generate(*PROMPT, *ALIGNED, "--head-dtype", "float32", "--json", "m.json")
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines() == [
        "manifest: m.json",
        "error: rl-bitwise is not verified for this run",
        "  profile qwen3 float32 cpu is not shipped for rl-bitwise",
        "  rl-bitwise needs a record of invariance, and none grants it",
        "  rl-bitwise needs a record of align, and none grants it",
        "where: option numerics, set by flag",
        "rule: a bitwise contract that is asked for is covered by a shipped profile, or by a "
        "record of invariance and of align for exactly this run",
        "remedy: earn it: pagedctl invariance --numerics rl-bitwise --model embedded "
        "--head-dtype float32 --record, then pagedctl align --numerics rl-bitwise --model "
        "embedded --dump DUMP --head-dtype float32 --record; or run with --unverified",
    ]
    assert "Traceback" not in done.err
    manifest = done.manifest("m.json")
    assert (manifest["status"], manifest["numerics"]["verified"]) == ("failed", False)
    assert manifest["error"]["where"] == "option numerics, set by flag"


def test_unverified_is_stamped_and_not_warned_of(
    generate: Generate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PAGEDCTL_HOME", str(tmp_path / "home"))
    done = generate(*PROMPT, *ALIGNED, "--unverified", "--json", "m.json")
    assert (done.code, warnings(done.err)) == (0, [])
    found = numerics(done.folder / "m.json")
    assert (found["contract"], found["verified"], found["eligible_by"]) == (
        "rl-bitwise", False, None
    )  # fmt: skip
    assert found["switches"]["yarn_frequency_device"]["note"].startswith("cuda means cpu")
    assert "note" not in found["switches"]["norm_cast"]


def test_both_records_grant_and_a_stale_one_is_refused_by_its_key(
    generate: Generate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("PAGEDCTL_HOME", str(home))
    invariance, align = earn(home, "invariance", "align")
    done = generate(*PROMPT, *ALIGNED, "--json", "m.json")
    assert (done.code, warnings(done.err)) == (0, [])
    found = numerics(done.folder / "m.json")
    assert (found["verified"], found["eligible_by"]) == (True, f"{invariance} and {align}")
    content = json.loads(align.read_bytes())
    content["versions"]["torch"] = "1.0"
    align.write_text(json.dumps(content))
    done = generate(*PROMPT, *ALIGNED)
    assert done.code == 2
    torch = json.loads(invariance.read_bytes())["versions"]["torch"]
    told = f"  {align} is stale: versions.torch is {torch}, the record is of 1.0"
    assert told in done.err.splitlines()
    align.write_text("{")
    done = generate(*PROMPT, *ALIGNED)
    assert done.code == 2
    assert f"  a record cannot be read: {align}, line 1, column " in done.err


def test_a_foreign_leaf_leaves_the_profile(cli: Cli, site: dict[str, str], tmp_path: Path) -> None:
    def run(*words: str) -> CompletedProcess[str]:
        (tmp_path / "m.json").unlink(missing_ok=True)
        return cli("generate", *PROMPT, *words, "--json", "m.json", env=site)

    done = run()
    assert done.returncode == 0, done.stderr
    assert warnings(done.stderr) == [
        "warning: invariant runs unverified: profile qwen3 float32 cpu covers the house's leaves, "
        "and op silu_mul is served by acme.silu_mul; to earn a record: pagedctl invariance "
        "--numerics invariant --model embedded --record (option numerics)"
    ]
    found = numerics(tmp_path / "m.json")
    assert (found["verified"], found["eligible_by"]) == (False, None)

    done = run("--numerics", "invariant")
    assert done.returncode == 2
    assert "error: invariant is not verified for this run\n" in done.stderr
    assert "op silu_mul is served by acme.silu_mul" in done.stderr

    done = run("--numerics", "invariant", "--leaf", "silu_mul=torch.silu_mul")
    assert (done.returncode, warnings(done.stderr)) == (0, [])
    assert numerics(tmp_path / "m.json")["verified"] is True

    done = run("--numerics", "invariant", "--leaf", "silu_mul=acme.silu_mul")
    assert done.returncode == 2
    assert "--leaf silu_mul=acme.silu_mul --record" in done.stderr


def test_commands_that_measure_or_prove_are_not_refused(cli: Cli, tmp_path: Path) -> None:
    line = '{"id": "a", "token_ids": [5, 6, 7, 8], "start": 1, "logprobs": [-1.0, -1.0, -1.0], '
    line += '"temperature": 1.0, "logprob_basis": "scaled"}\n'
    (tmp_path / "in.jsonl").write_text(line)
    work = "decode:requests=2,prompt=4,output=2"
    for name, code, words in (
        ("bench", 0, ("bench", "--workload", work, "--repeats", "1", "--warmup", "0")),
        ("check", 1, ("score", "-i", "in.jsonl", "--check")),
        ("score", 2, ("score", "-i", "in.jsonl", "-o", "s.jsonl")),
    ):
        done = cli(*words, *SMALL, *ALIGNED, "--json", f"{name}.json")
        assert done.returncode == code, done.stderr
        assert ("is not verified for this run" in done.stderr) == (name == "score")
        assert "unverified" not in "".join(warnings(done.stderr))
        assert numerics(tmp_path / f"{name}.json")["verified"] is False


# -- resuming --------------------------------------------------------------------------------


def interrupt(folder: Path) -> bytes:
    """Leave what a kill before the last line leaves; the whole output."""
    whole = (folder / "out.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    (folder / "out.jsonl").write_bytes(b"".join(lines[:-1]))
    manifest = folder / "out.jsonl.manifest.json"
    header = {**json.loads(manifest.read_bytes()), "status": "interrupted"}
    manifest.unlink()
    (folder / "out.jsonl.partial.json").write_text(json.dumps(header))
    return whole


def test_a_run_is_resumed_by_one_that_differs_in_verification_alone(
    generate: Generate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("PAGEDCTL_HOME", str(home))
    two = ("--prompt", "Ann has 5", "-o", "out.jsonl", "--seed", "3", *PROMPT, *ALIGNED)

    def unverified_or(verified: bool) -> tuple[str, ...]:
        return () if verified else ("--unverified",)

    records = earn(home, "invariance", "align")
    aside = home / "aside"
    aside.mkdir()
    for first, second in ((False, True), (True, False)):
        for name in ("out.jsonl", "out.jsonl.manifest.json"):
            (tmp_path / name).unlink(missing_ok=True)
        for now, words in ((first, two), (second, (*two, "--resume"))):
            for path in records:
                if now and not path.exists():
                    (aside / path.name).rename(path)
                if not now and path.exists():
                    path.rename(aside / path.name)
            done = generate(*words, *unverified_or(now))
            assert done.code == 0, done.err
            assert numerics(tmp_path / "out.jsonl.manifest.json")["verified"] is now
            if words is two:
                whole = interrupt(tmp_path)
        assert (tmp_path / "out.jsonl").read_bytes() == whole


# -- models inspect --------------------------------------------------------------------------


def test_inspect_tells_which_records_a_model_has(cli: Cli, tmp_path: Path) -> None:
    home = tmp_path / "home"

    def eligible() -> dict[str, Any]:
        done = cli("models", "inspect", "embedded", "--json")
        assert done.returncode == 0
        manifest = json.loads(done.stdout)
        found: dict[str, Any] = manifest["metrics"]["eligible"]["rl-bitwise"]
        return {**found, "warnings": [one["code"] for one in manifest["warnings"]]}

    assert eligible()["verified"] is False
    (invariance,) = earn(home, "invariance")
    half = eligible()
    assert (half["verified"], half["eligible_by"]) == (False, None)
    assert half["text"] == (
        "unverified: no profile covers qwen3 float32, and there is no record of align; there is "
        f"{invariance}"
    )
    (align,) = earn(home, "align")
    both = eligible()
    assert (both["verified"], both["eligible_by"]) == (True, f"{invariance} and {align}")
    assert both["text"].endswith("are checked when an engine starts")
    stale = json.loads(align.read_text())
    now = stale["versions"]["torch"]
    stale["versions"]["torch"] = "1.0"
    align.write_text(json.dumps(stale))
    assert eligible()["verified"] is False
    stale["versions"]["torch"] = now
    align.write_text(json.dumps(stale))
    assert eligible()["verified"] is True
    other = cli("models", "inspect", "qwen3-8b", "--json")
    assert json.loads(other.stdout)["metrics"]["eligible"]["rl-bitwise"]["verified"] is False
    align.write_text("{")
    assert eligible()["warnings"] == ["damaged_record"]
    done = cli("models", "inspect", "embedded")
    assert done.returncode == 0
    assert "a verification record cannot be read: not strict JSON" in done.stderr
