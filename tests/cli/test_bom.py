"""A byte order mark: accepted at the start of a file, refused anywhere else with its line."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from pagedctl.cli.main import BODIES
from pagedctl.config.plan_file import read_plan_file
from pagedctl.config.surface import COMMANDS
from pagedctl.errors import PagedctlError
from pagedctl.manifest.peer_files import read_peer_file
from pagedctl.manifest.reader import read_manifest
from pagedctl.manifest.schema import Manifest, ToolInfo
from pagedctl.manifest.writer import to_bytes
from pagedctl.models.inspection import inspect_model
from pagedctl.models.locate import EMBEDDED_FOLDER
from tests.cli.every_command import Folder, folder_of_commands, input_lines, words_of
from tests.manifest.peer_samples import LATENCY

BOM = b"\xef\xbb\xbf"

# -- commands that read lines ------------------------------------------------------------

LINE_OPTIONS = ("input", "workload", "prompts")
READERS_OF_LINES = [
    (name, option)
    for name in BODIES
    for option in LINE_OPTIONS
    if option in COMMANDS[name].all_options()
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    with folder_of_commands(tmp_path, monkeypatch, {}) as found:
        yield found


@dataclass(frozen=True, kw_only=True)
class Left:
    """What a run left: its exit code, its lines, and how many requests it completed."""

    code: int
    lines: list[dict[str, Any]]
    completed: object


def run(folder: Folder, name: str, option: str, data: bytes) -> Left:
    """The command over a file of *data*."""
    (folder.path / "lines.jsonl").write_bytes(data)
    output, path = folder.path / "output.jsonl", folder.path / "m.json"
    for one in (output, path):
        one.unlink(missing_ok=True)
    words = words_of(COMMANDS[name], **{option: "lines.jsonl"})
    code = folder.run(*words, "--quiet", "--json", str(path))
    text = output.read_text() if output.exists() else ""
    lines = sorted(map(json.loads, text.splitlines()), key=lambda line: str(line["id"] or "z"))
    metrics = json.loads(path.read_bytes())["metrics"]
    return Left(code=code, lines=lines, completed=metrics.get("requests_completed"))


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize(("name", "option"), READERS_OF_LINES)
def test_a_bom_at_the_start_of_the_lines_changes_nothing(
    folder: Folder, name: str, option: str, packed: bool
) -> None:
    """microsoft/promptflow#4188, #3670; huggingface/datasets#8241: the first record was lost."""
    data = "\n".join(input_lines(COMMANDS[name])).encode()
    pack: Callable[[bytes], bytes] = gzip.compress if packed else bytes
    without = run(folder, name, option, pack(data))
    assert without.code == 0
    assert run(folder, name, option, pack(BOM + data)) == without


@pytest.mark.parametrize(("name", "option"), READERS_OF_LINES)
def test_a_bom_on_line_2_is_an_error_with_its_line_number(
    folder: Folder, name: str, option: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """microsoft/promptflow#3670: files joined with cat keep the BOM of each part."""
    first, second = (line.encode() for line in input_lines(COMMANDS[name]))
    found = run(folder, name, option, first + b"\n" + BOM + second)
    talk = capfd.readouterr().err
    assert found.code == 2
    assert "error: a byte order mark (BOM) stands inside the file" in talk
    assert "where: lines.jsonl, line 2, column 1" in talk
    if found.lines:
        served, refused = found.lines[0], found.lines[1]
        assert "error" not in served
        assert refused["error"]["where"] == "lines.jsonl, line 2, column 1"


def test_every_kind_of_line_is_read_by_a_command() -> None:
    assert {("generate", "input"), ("bench", "workload")} <= set(READERS_OF_LINES)


# -- whole files -------------------------------------------------------------------------


def snapshot(folder: Path) -> Path:
    """The embedded model as a snapshot with an index, its JSON files over several lines."""
    model = folder / "model"
    shutil.copytree(EMBEDDED_FOLDER, model)
    shard = "model-00001-of-00001.safetensors"
    (model / "model.safetensors").rename(model / shard)
    with safe_open(model / shard, framework="np") as tensors:
        names = list(tensors.keys())
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, shard)}
    (model / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return model


def a_plan(folder: Path) -> Path:
    path = folder / "p.toml"
    path.write_text('schema = "pagedctl.plan/1"\nname = "p"\nparallel = { tp = 2 }\n')
    return path


def a_manifest(folder: Path) -> Path:
    path = folder / "m.json"
    manifest = Manifest(
        command="bench",
        argv=(),
        status="complete",
        created_utc="2026-12-01T09:30:00Z",
        wall_s=1.0,
        tool=ToolInfo(version="0"),
        versions={},
    )
    path.write_bytes(to_bytes(manifest))
    return path


def a_peer(folder: Path) -> Path:
    path = folder / "latency.json"
    path.write_text(json.dumps(LATENCY, indent=4))
    return path


def model_file(name: str) -> Callable[[Path], Path]:
    return lambda folder: snapshot(folder) / name


def inspected(path: Path) -> object:
    return inspect_model(str(path.parent), environ={}).metrics()


WHOLE_FILES: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object]]] = {
    "plan": (a_plan, lambda path: read_plan_file(str(path))),
    "manifest": (a_manifest, lambda path: read_manifest(path).manifest),
    "peer": (a_peer, lambda path: read_peer_file(path)[0].metrics),
    **{
        name: (model_file(name), inspected)
        for name in (
            "config.json",
            "generation_config.json",
            "tokenizer_config.json",
            "model.safetensors.index.json",
        )
    },
}


@pytest.mark.parametrize("kind", WHOLE_FILES)
def test_a_bom_at_the_start_of_a_file_changes_nothing(tmp_path: Path, kind: str) -> None:
    """microsoft/promptflow#4188, huggingface/datasets#8241: an editor put it there."""
    make, read = WHOLE_FILES[kind]
    path = make(tmp_path)
    without = read(path)
    path.write_bytes(BOM + path.read_bytes())
    assert read(path) == without


@pytest.mark.parametrize("kind", WHOLE_FILES)
def test_a_bom_further_on_is_refused_with_its_line(tmp_path: Path, kind: str) -> None:
    make, read = WHOLE_FILES[kind]
    path = make(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\n" + BOM, 1))
    with pytest.raises(PagedctlError, match="line 2, column 1") as caught:
        read(path)
    assert str(path) in caught.value.where


def test_a_tokenizer_with_a_bom_is_refused_and_never_half_read(tmp_path: Path) -> None:
    """Its library takes none; the refusal says so."""
    path = snapshot(tmp_path) / "tokenizer.json"
    path.write_bytes(BOM + path.read_bytes())
    with pytest.raises(PagedctlError, match="BOM") as caught:
        inspected(path)
    assert caught.value.where == str(path)
