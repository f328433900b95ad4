"""``generate --resume``: what an earlier run left decides what is done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedctl.engine.engine import Engine
from tests.cli.generate_harness import Generate
from tests.cli.kill_harness import Ended
from tests.cli.resume_harness import (
    HEADER,
    MANIFEST,
    NUM_LINES,
    OUTPUT,
    QUIET,
    WORDS,
    contents,
    no_engine,
    take,
)


def test_a_run_begins_where_none_did(generate: Generate, tmp_path: Path, killed: Path) -> None:
    """Also in an empty file, which a kill before the header leaves."""
    take(killed, tmp_path, "in.jsonl")
    done = generate(*WORDS[1:], *QUIET, "--resume")
    assert (done.code, len(done.lines())) == (2, NUM_LINES)
    (tmp_path / "empty.jsonl").touch()
    words = [word.replace(OUTPUT, "empty.jsonl") for word in WORDS[1:]]
    assert generate(*words, *QUIET, "--resume").code == 2
    assert contents(tmp_path / "empty.jsonl") == contents(tmp_path / OUTPUT)
    assert done.files == {
        *("in.jsonl", OUTPUT, MANIFEST, "empty.jsonl", "empty.jsonl.manifest.json"),
    }


def test_a_resumed_run_says_what_it_kept_and_counts_its_own_part(
    generate: Generate, tmp_path: Path, killed: Path, whole: tuple[Path, Ended]
) -> None:
    take(killed, tmp_path, "in.jsonl", OUTPUT, HEADER)
    kept = (tmp_path / OUTPUT).read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    done = generate(*WORDS[1:], "--unverified", "--resume")
    assert done.code == 2
    assert (tmp_path / OUTPUT).read_bytes().startswith(kept)
    assert contents(tmp_path / OUTPUT) == contents(whole[0] / OUTPUT)
    new = done.lines()[7:]
    assert [line["sample"] for line in new if line["id"] == "a"] == [2]
    metrics = done.manifest()["metrics"]
    assert (metrics["lines_kept"], metrics["error_lines_kept"]) == (7, 5)
    assert metrics["output_tokens"] == sum(len(line["token_ids"]) for line in new)
    assert metrics["finish_reasons"]["length"] == len(new)
    assert (metrics["requests_refused"], metrics["requests_failed"]) == (0, 0)
    assert metrics["requests_completed"] == len({line["id"] for line in new}) == 4
    prompts = {line["id"]: len(line["prompt_token_ids"]) for line in new}
    assert metrics["prompt_tokens"] == sum(prompts.values())
    assert f"resuming {OUTPUT}: 7 lines kept, and a torn one cut off" in done.err.splitlines()
    assert done.out.startswith("4 requests x 1..2 · ")
    assert done.out.rstrip().endswith("· kept 7 lines, 5 errors among them")
    assert done.files == {"in.jsonl", OUTPUT, MANIFEST}


def test_a_complete_output_is_answered_as_it_was_and_left_alone(
    generate: Generate, tmp_path: Path, whole: tuple[Path, Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    take(whole[0], tmp_path, "in.jsonl", OUTPUT, MANIFEST)
    before = (tmp_path / OUTPUT).read_bytes()
    monkeypatch.setattr(Engine, "__init__", no_engine)
    done = generate(*WORDS[1:], "--resume")
    assert (done.code, done.out) == (2, "")
    assert f"{OUTPUT} is complete: nothing is left to do\nmanifest: {MANIFEST}\n" in done.err
    assert done.files == {"in.jsonl", OUTPUT, MANIFEST}
    assert json.loads(generate(*WORDS[1:], "--resume", "--json").out) == done.manifest()
    refused = generate(*WORDS[1:], "--resume", "--seed", "5")
    assert refused.code == 2
    assert refused.err.startswith("error: seed is 5, and was 4\nwhere: option seed, set by flag\n")
    assert (tmp_path / OUTPUT).read_bytes() == before


def test_an_output_without_errors_that_is_complete_answers_yes(generate: Generate) -> None:
    words = ("--prompt", "Tom", "--max-tokens", "2", "-o", OUTPUT, *QUIET, "--resume")
    assert [generate(*words).code for _ in range(2)] == [0, 0]


def test_a_kill_between_manifest_and_header_is_finished(
    generate: Generate, tmp_path: Path, whole: tuple[Path, Ended], killed: Path
) -> None:
    take(whole[0], tmp_path, "in.jsonl", OUTPUT, MANIFEST)
    take(killed, tmp_path, HEADER)
    done = generate(*WORDS[1:], *QUIET, "--resume")
    assert (done.code, done.files) == (2, {"in.jsonl", OUTPUT, MANIFEST})


def test_a_kill_after_the_last_line_needs_no_engine(
    generate: Generate,
    tmp_path: Path,
    whole: tuple[Path, Ended],
    killed: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take(whole[0], tmp_path, "in.jsonl", OUTPUT)
    take(killed, tmp_path, HEADER)
    monkeypatch.setattr(Engine, "__init__", no_engine)
    done = generate(*WORDS[1:], *QUIET, "--resume")
    assert (done.code, done.files) == (2, {"in.jsonl", OUTPUT, MANIFEST})
    manifest, reference = done.manifest(), json.loads((whole[0] / MANIFEST).read_bytes())
    for key in ("status", "model", "numerics"):
        assert manifest[key] == reference[key]
    assert manifest["config"] == {**reference["config"], "resume": True}
    assert manifest["metrics"]["lines_kept"] == NUM_LINES


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (
            (OUTPUT,),
            f"{OUTPUT} holds lines, and there is neither {HEADER} nor a manifest {MANIFEST}",
        ),
        ((HEADER,), f"{OUTPUT} does not exist, and its header {HEADER} does"),
    ],
)
def test_an_output_or_a_header_alone_is_refused_and_untouched(
    generate: Generate, tmp_path: Path, killed: Path, names: tuple[str, ...], problem: str
) -> None:
    take(killed, tmp_path, "in.jsonl", *names)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    done = generate(*WORDS[1:], *QUIET, "--resume")
    assert done.code == 2
    assert done.err.startswith(f"error: {problem}")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_manifest_alone_is_refused_and_untouched(
    generate: Generate, tmp_path: Path, whole: tuple[Path, Ended]
) -> None:
    """The output of a complete run was moved away."""
    take(whole[0], tmp_path, "in.jsonl", MANIFEST)
    done = generate(*WORDS[1:], *QUIET, "--resume")
    assert (done.code, done.files) == (2, {"in.jsonl", MANIFEST})
    assert done.err.startswith(f"error: {MANIFEST} exists")


@pytest.mark.parametrize("text", ["precious", "{}", '{"schema": "pagedctl.manifest/1"}'])
def test_another_file_under_the_manifests_name_is_refused_and_untouched(
    generate: Generate, tmp_path: Path, killed: Path, text: str
) -> None:
    take(killed, tmp_path, "in.jsonl", OUTPUT, HEADER)
    (tmp_path / "m.json").write_text(text)
    done = generate(*WORDS[1:], *QUIET, "--resume", "--json", "m.json")
    assert (done.code, (tmp_path / "m.json").read_text()) == (2, text)
    assert done.err.startswith("error: m.json exists\nwhere: --json\n")


@pytest.mark.parametrize("named", [(), ("--json", "m.json")])
def test_the_manifest_of_an_interrupted_part_is_moved_aside(
    generate: Generate,
    tmp_path: Path,
    killed: Path,
    monkeypatch: pytest.MonkeyPatch,
    named: tuple[str, ...],
) -> None:
    """Two parts that Ctrl-C ends, then one that comes to its end."""
    take(killed, tmp_path, "in.jsonl")
    name = named[1] if named else MANIFEST
    step = Engine.step
    statuses = []
    hint = "the same command with --resume finishes the output"
    for number in range(3):

        def interrupted_step(engine: Engine, number: int = number) -> list[Any]:
            if number < 2 and engine.stats().steps == 5:
                raise KeyboardInterrupt
            return step(engine)

        monkeypatch.setattr(Engine, "step", interrupted_step)
        done = generate(*WORDS[1:], "--unverified", "--resume", *named)
        statuses.append((int(done.code), done.manifest(name)["status"]))
        assert (hint in done.err.splitlines()) == (number < 2)
        if number:
            stem = name.removesuffix(".json")
            note = f"{name}, the manifest of an earlier part, is now {stem}.{number}.json"
            assert note in done.err.splitlines()
    assert statuses == [(130, "interrupted"), (130, "interrupted"), (2, "complete")]
    assert len(done.lines()) == NUM_LINES
    stem = name.removesuffix(".json")
    parts = {f"{stem}.{number}.json" for number in (1, 2)}
    assert done.files == {"in.jsonl", OUTPUT, name, *parts}
    assert {done.manifest(part)["status"] for part in parts} == {"interrupted"}


def test_a_run_that_failed_before_its_first_line_begins_again(
    generate: Generate, tmp_path: Path
) -> None:
    words = ("--prompt", "Tom", "--max-tokens", "2", "-o", OUTPUT, *QUIET, "--resume")
    for _ in range(2):
        done = generate(*words, "--kv-cache-memory-bytes", "1")
        assert (done.code, done.manifest()["status"]) == (2, "failed")
    assert done.files == {MANIFEST, "out.jsonl.manifest.1.json"}
    assert generate(*words).code == 0
