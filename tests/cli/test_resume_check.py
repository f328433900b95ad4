"""``generate --resume``: another run, a damaged output and a second writer are refused."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagedctl.engine.engine import Engine
from pagedctl.errors import ConfigError
from pagedctl.manifest import files
from pagedctl.models.locate import EMBEDDED_FOLDER
from tests.cli.generate_harness import Generate, write_lines
from tests.cli.kill_harness import CommandLine, Ended
from tests.cli.resume_harness import (
    CODES,
    HEADER,
    KILL,
    LONG,
    LONG_WORDS,
    MANIFEST,
    NUM_LINES,
    OUTPUT,
    QUIET,
    WORDS,
    Copy,
    contents,
    killed_after,
    left_as_it_was,
    no_engine,
    take,
)

# -- what makes it another run -----------------------------------------------------------------


def test_every_changed_option_is_named_with_both_values(
    generate: Generate, tmp_path: Path, killed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(killed, tmp_path, "in.jsonl", OUTPUT, HEADER)
    monkeypatch.setattr(Engine, "__init__", no_engine)
    done = generate(
        *WORDS[1:],
        *("--resume", "--seed", "5", "--temperature", "0.5", "-n", "2", "--keep", "more", "--chat"),
        *("--max-model-len", "100", "--logprob-basis", "raw", "--dtype", "bfloat16"),
        *("--stop", "END", "--kv-dtype", "bfloat16", "--no-ignore-eos"),
    )
    assert done.code == 2
    assert [line for line in done.err.splitlines() if line.startswith("error: ")] == [
        "error: dtype is bfloat16, and was float32",
        "error: max_model_len is 100, and was 337",
        "error: kv_dtype is bfloat16, and was float32",
        "error: n is 2, and was 1",
        "error: temperature is 0.5, and was 1.0",
        "error: seed is 5, and was 4",
        "error: stop is ['END'], and was []",
        "error: ignore_eos is false, and was true",
        "error: chat is true, and was false",
        "error: keep is ['answer', 'more'], and was ['answer']",
        "error: switch logprob_basis is raw, and was scaled",
    ]
    assert done.err.count("where: option seed, set by flag\n") == 1
    assert left_as_it_was(done, killed)


def test_batching_options_are_free_under_a_bitwise_contract(
    generate: Generate, tmp_path: Path, killed: Path, whole: tuple[Path, Ended]
) -> None:
    """So are a switch's own value, talk, and another name of the same input and model."""
    take(killed, tmp_path, OUTPUT, HEADER)
    shutil.copyfile(killed / "in.jsonl", tmp_path / "renamed.jsonl")
    shutil.copytree(EMBEDDED_FOLDER, tmp_path / "model")
    words = [word.replace("in.jsonl", "renamed.jsonl") for word in WORDS[1:]]
    done = generate(
        *(*words, "--resume", "--model", "model", "--logprob-basis", "scaled", "--no-progress"),
        *("--max-num-seqs", "7", "--chunk-size", "3", "--max-num-batched-tokens", "64"),
        *("--no-prefix-cache", "--lag", "1"),
    )
    assert done.code == 2, done.err
    found = [line.replace("renamed.jsonl", "in.jsonl") for line in contents(tmp_path / OUTPUT)]
    assert sorted(found) == contents(whole[0] / OUTPUT)


def test_the_pool_decides_lines_where_it_decides_lengths(
    generate: Generate, tmp_path: Path, killed: Path
) -> None:
    """A derived max_model_len is known once the engine is built: refused, and no line touched."""
    take(killed, tmp_path, "in.jsonl", OUTPUT, HEADER)
    done = generate(*WORDS[1:], *QUIET, "--resume", "--kv-cache-memory-bytes", "2MiB")
    assert done.code == 2
    assert "error: max_model_len is 673, and was 337\n" in done.err
    for name in (OUTPUT, HEADER):
        assert (tmp_path / name).read_bytes() == (killed / name).read_bytes()
    assert done.manifest()["status"] == "failed"


def test_batching_options_are_fixed_without_a_bitwise_contract(
    command: CommandLine, new_folder: Copy
) -> None:
    folder = new_folder()
    words = (*WORDS, *QUIET, "--numerics", "fast")
    assert command.run(folder, *words, mutation=killed_after(8)).code == CODES[KILL]
    refused = command.run(folder, *words, "--resume", "--max-num-seqs", "7")
    assert (refused.code, refused.err.splitlines()[0]) == (
        2,
        "error: max_num_seqs is 7, and was 2",
    )
    assert command.run(folder, *words, "--resume").code == 2
    assert len(contents(folder / OUTPUT)) == NUM_LINES


def test_another_number_of_threads_is_another_arithmetic(
    command: CommandLine, new_folder: Copy, killed: Path
) -> None:
    folder = new_folder()
    take(killed, folder, OUTPUT, HEADER)
    threads = "import torch; torch.set_num_threads({})"
    header = json.loads((folder / HEADER).read_bytes())
    had = header["numerics"]["arithmetic_id"]
    refused = command.run(folder, *WORDS, *QUIET, "--resume", mutation=threads.format(3))
    assert refused.code == 2
    assert refused.err.splitlines()[-4].startswith("error: arithmetic_id is ")
    assert refused.err.splitlines()[-4].endswith(f", and was {had}")
    for name in (OUTPUT, HEADER):
        assert (folder / name).read_bytes() == (killed / name).read_bytes()


def test_another_input_is_refused(generate: Generate, tmp_path: Path, killed: Path) -> None:
    take(killed, tmp_path, "in.jsonl", OUTPUT, HEADER)
    with (tmp_path / "in.jsonl").open("a") as stream:
        stream.write('{"prompt_token_ids": [5]}\n')
    done = generate(*WORDS[1:], *QUIET, "--resume")
    assert done.code == 2
    assert done.err.startswith("error: input digest is ")
    assert (tmp_path / OUTPUT).read_bytes() == (killed / OUTPUT).read_bytes()
    texts = [word for word in WORDS[1:] if word not in ("-i", "in.jsonl")]
    done = generate(*texts, "--prompt", "Tom", *QUIET, "--resume")
    assert "error: prompt is ['Tom'], and was []\n" in done.err
    assert "error: input digest is not given, and was " in done.err


def test_other_files_of_the_model_are_refused(
    generate: Generate, tmp_path: Path, killed: Path
) -> None:
    take(killed, tmp_path, "in.jsonl", OUTPUT, HEADER)
    model = tmp_path / "model"
    shutil.copytree(EMBEDDED_FOLDER, model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "any": 1}))
    done = generate(*WORDS[1:], *QUIET, "--resume", "--model", "model")
    assert done.code == 2
    assert done.err.startswith("error: model digest is sha256:")
    assert done.err.count("error: ") == 1
    assert left_as_it_was(done, killed)


def test_piped_gzip_is_resumed_when_it_comes_again(
    command: CommandLine, new_folder: Copy, whole: tuple[Path, Ended]
) -> None:
    folder = new_folder()
    data = (folder / "in.jsonl").read_bytes()
    (folder / "in.gz").write_bytes(gzip.compress(data, mtime=0))
    words = [word for word in WORDS if word not in ("-i", "in.jsonl")]
    ended = command.run(folder, *words, *QUIET, stdin="in.gz", mutation=killed_after(8))
    assert ended.code == CODES[KILL]
    refused = command.run(folder, *words, *QUIET, "--resume", stdin="in.jsonl")
    assert refused.err.startswith("error: input digest is ")
    assert command.run(folder, *words, *QUIET, "--resume", stdin="in.gz").code == 2
    found = [line.replace("stdin", "in.jsonl") for line in contents(folder / OUTPUT)]
    assert sorted(found) == contents(whole[0] / OUTPUT)


def test_texts_of_the_command_line_are_resumed(command: CommandLine, new_folder: Copy) -> None:
    folder, whole = new_folder(), new_folder()
    prompts = ("--prompt", "Tom has 3", "--prompt", "Ann", "-n", "2", "--max-tokens", "3")
    words = ("generate", "-o", OUTPUT, *prompts, *QUIET)
    assert command.run(whole, *words).code == 0
    assert command.run(folder, *words, mutation=killed_after(2)).code == CODES[KILL]
    refused = command.run(folder, *words, "--resume", "--prompt", "Joe")
    assert refused.err.startswith("error: prompt is ['Tom has 3', 'Ann', 'Joe'], and was ")
    assert command.run(folder, *words, "--resume").code == 0
    assert contents(folder / OUTPUT) == contents(whole / OUTPUT)


# -- damage ------------------------------------------------------------------------------------

REFUSAL = {"sample": 0, "error": {"kind": "bad_json"}}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ('{"id": "a", "sam', "the line is damaged: not strict JSON"),
        ("[]", "the line holds [], not an object"),
        ({"id": "other"}, 'the input has no request of id "other"'),
        ({"id": "9"}, 'the input has no request of id "9"'),
        ({"id": [1]}, "the id [1] is not text or an integer"),
        ({"sample": 3}, "sample 3 is none of the request's samples 0 to 2"),
        ({"sample": True}, "sample true is none of the request's samples 0 to 2"),
        ({}, 'sample 0 of id "a" has an earlier line'),
        (
            {"sample": 2, "prompt_token_ids": [5]},
            'the prompt of id "a" is another than the input\'s',
        ),
        ({"sample": 2, "logprobs": [0.5]}, "the line has not one logprob for each token"),
        (json.dumps({"id": None, **REFUSAL}), "the input has no further request of id null"),
        (json.dumps({"id": "other", **REFUSAL}), 'the input has no further request of id "other"'),
    ],
)
def test_a_whole_line_that_does_not_belong_there_is_refused(
    generate: Generate,
    tmp_path: Path,
    killed: Path,
    changes: dict[str, Any] | str,
    problem: str,
) -> None:
    """The refusal names the line, and nothing is changed."""
    take(killed, tmp_path, "in.jsonl", OUTPUT, HEADER)
    lines = (tmp_path / OUTPUT).read_text().split("\n")[:7]
    first = json.loads(lines[5])
    assert (first["id"], first["sample"]) == ("a", 0)
    lines.append(changes if isinstance(changes, str) else json.dumps({**first, **changes}))
    before = "".join(f"{line}\n" for line in lines)
    (tmp_path / OUTPUT).write_text(before)
    done = generate(*WORDS[1:], *QUIET, "--resume")
    assert done.code == 2
    what, where, *_ = done.err.splitlines()
    assert what.startswith(f"error: {problem}")
    assert where == f"where: {OUTPUT}, line 8"
    assert (tmp_path / OUTPUT).read_text() == before
    assert done.files == {"in.jsonl", OUTPUT, HEADER}


def test_a_sample_that_failed_is_answered(
    generate: Generate, tmp_path: Path, killed: Path, whole: tuple[Path, Ended]
) -> None:
    """It is not sampled again, and its request counts as completed nowhere."""
    take(killed, tmp_path, "in.jsonl", HEADER)
    lines = [json.loads(line) for line in (killed / OUTPUT).read_text().split("\n")[:7]]
    lines[6] |= {"finish_reason": None, "error": {"kind": "non_finite"}}
    write_lines(tmp_path / OUTPUT, *lines)
    done = generate(*WORDS[1:], *QUIET, "--resume")
    assert (done.code, len(done.lines())) == (2, NUM_LINES)
    assert [line["error"] for line in done.lines() if line.get("finish_reason", 0) is None]
    metrics = done.manifest()["metrics"]
    assert (metrics["requests_completed"], metrics["error_lines_kept"]) == (3, 6)


def test_a_failed_sample_kept_from_an_earlier_part_is_no_whole_answer(
    generate: Generate, tmp_path: Path
) -> None:
    """The exit code is that of the whole output."""
    words = ("--prompt", "Tom", "-n", "2", "--max-tokens", "2", "-o", OUTPUT, *QUIET, "--resume")
    assert generate(*words).code == 0
    (tmp_path / MANIFEST).rename(tmp_path / HEADER)
    header = json.loads((tmp_path / HEADER).read_bytes())
    (tmp_path / HEADER).write_text(json.dumps({**header, "status": "interrupted"}))
    line = json.loads((tmp_path / OUTPUT).read_text().splitlines()[0])
    failed = {**line, "finish_reason": None, "error": {"kind": "non_finite"}}
    write_lines(tmp_path / OUTPUT, failed)
    assert [generate(*words).code for _ in range(2)] == [2, 2]


# -- one writer --------------------------------------------------------------------------------


def test_an_output_that_is_being_written_is_refused(
    generate: Generate, tmp_path: Path, killed: Path
) -> None:
    take(killed, tmp_path, "in.jsonl", OUTPUT, HEADER)
    claim = files.claim(tmp_path / OUTPUT, "--output", existing=True)
    done = generate(*WORDS[1:], *QUIET, "--resume")
    os.close(claim.descriptor)
    assert done.code == 2
    assert done.err.startswith(f"error: another run is writing {OUTPUT}\n")
    assert left_as_it_was(done, killed)
    assert len(generate(*WORDS[1:], *QUIET, "--resume").lines()) == NUM_LINES


def test_a_file_system_without_locks_is_warned_of(
    generate: Generate, tmp_path: Path, killed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    take(killed, tmp_path, "in.jsonl", OUTPUT, HEADER)
    done = generate(*WORDS[1:], *QUIET, "--resume")
    assert done.err.startswith("warning: this file system has no locks: let no other run write ")
    assert len(done.lines()) == NUM_LINES


def test_the_output_is_held_until_the_manifest_is_written_and_the_header_is_gone(
    generate: Generate, tmp_path: Path, killed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(killed, tmp_path, "in.jsonl", OUTPUT, HEADER)
    publish, unlink = files.write_new, Path.unlink
    seen: list[tuple[str, str]] = []

    def second_claim(path: Path) -> None:
        with pytest.raises(ConfigError) as caught:
            files.claim(tmp_path / OUTPUT, "--output", existing=True)
        seen.append((path.name, str(caught.value).splitlines()[0]))

    def write_new(path: Path, data: bytes, **options: bool) -> None:
        second_claim(path)
        publish(path, data, **options)

    def unlinked(path: Path, **options: bool) -> None:
        second_claim(path)
        unlink(path, **options)

    monkeypatch.setattr(files, "write_new", write_new)
    monkeypatch.setattr(Path, "unlink", unlinked)
    assert generate(*WORDS[1:], *QUIET, "--resume").code == 2
    held = f"error: another run is writing {tmp_path / OUTPUT}"
    assert [one for one in seen if one[0] in (MANIFEST, HEADER)] == [
        (MANIFEST, held),
        (HEADER, held),
    ]


def test_of_two_processes_that_begin_at_once_one_writes(
    tmp_path: Path, clean_environ: dict[str, str]
) -> None:
    """The other is refused, or finds the output complete; no line is written twice."""
    write_lines(tmp_path / "in.jsonl", *LONG)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "pagedctl", *LONG_WORDS, "--resume"],
            cwd=tmp_path,
            env=clean_environ,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    talks = [process.communicate(timeout=120)[1] for process in processes]
    for process, talk in zip(processes, talks, strict=True):
        refused = talk.startswith(f"error: another run is writing {OUTPUT}\n")
        assert (process.returncode, refused) in ((0, False), (2, True))
    assert len(set(contents(tmp_path / OUTPUT))) == 2 * len(LONG)
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "home", OUTPUT, MANIFEST}
