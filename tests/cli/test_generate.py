"""``pagedctl generate``: files, streams, refusals and ends."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedctl.cli.completion_output import FileOutput
from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Completion
from pagedctl.errors import ConfigError
from pagedctl.manifest import files
from pagedctl.models.locate import EMBEDDED_FOLDER
from pagedctl.numerics.random_stream import derive_seed
from tests.cli.generate_harness import SMALL, Generate, parsed, write_lines

REQUEST = {"id": "a", "prompt_token_ids": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}


def test_a_file_of_requests_becomes_a_file_of_completions(
    generate: Generate, tmp_path: Path
) -> None:
    path = write_lines(
        tmp_path / "in.jsonl",
        {**REQUEST, "n": 2, "answer": "18", "metadata": {"a": 1}},
        "",
        {"messages": [{"role": "user", "content": "Tom has 3 apples."}], "max_tokens": 3},
        {"prompt": "Tom", "temperature": 0, "max_tokens": 2, "seed": 7},
    )
    done = generate("-i", "in.jsonl", "-o", "out.jsonl", "--keep", "answer", "--seed", "9", *SMALL)
    assert (done.code, done.files) == (0, {"in.jsonl", "out.jsonl", "out.jsonl.manifest.json"})
    lines = {(line["id"], line["sample"]): line for line in done.lines()}
    assert set(lines) == {("a", 0), ("a", 1), (2, 0), (3, 0)}
    for line in lines.values():
        assert len(line["token_ids"]) == len(line["logprobs"])
        assert isinstance(line["text"], str)
    assert lines["a", 0]["metadata"] == {"a": 1, "answer": "18"}
    assert lines["a", 0]["seed"] == derive_seed(9, "a")
    assert lines["a", 1]["seed"] == derive_seed(derive_seed(9, "a"), 1)
    assert lines[3, 0]["seed"] == 7
    assert lines[2, 0]["prompt_token_ids"][0] == 1  # <|im_start|>

    manifest = done.manifest()
    assert (manifest["status"], manifest["model"]["name"]) == ("complete", "embedded")
    assert manifest["config"]["seed"] == 9
    assert manifest["config_origin"]["seed"] == "flag"
    assert manifest["config"]["keep"] == ["answer"]
    for role, name in (("input", "in.jsonl"), ("output", "out.jsonl")):
        data = (tmp_path / name).read_bytes()
        entry = {
            "role": role,
            "path": name,
            "sha256": hashlib.sha256(data).hexdigest(),
            "bytes": len(data),
        }
        assert entry in manifest["files"]
    assert manifest["workload"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    metrics = manifest["metrics"]
    assert metrics["requests_completed"] == 3
    assert metrics["output_tokens"] == sum(len(line["token_ids"]) for line in lines.values())
    assert done.out.startswith("3 requests x 1..2 · ")
    assert done.err.splitlines()[-1] == "manifest: out.jsonl.manifest.json"


def test_stdin_to_stdout_has_nothing_but_lines_on_stdout(generate: Generate) -> None:
    data = gzip.compress(json.dumps(REQUEST).encode() + b"\r\n")
    done = generate("--json", "m.json", *SMALL, stdin=data)
    assert done.code == 0
    (line,) = parsed(done.out)
    assert (line["id"], line["finish_reason"], line["stop_reason"]) == ("a", "length", None)
    summary, note = done.err.splitlines()[-2:]
    assert summary.startswith("1 request x 1 · 4 tokens · ")
    assert summary.endswith("· stop 0 length 1 abort 0 · prefix hits 0 · preemptions 0")
    assert note == "manifest: m.json"
    (entry,) = done.manifest("m.json")["files"]
    assert (entry["path"], entry["sha256"]) == ("stdin", hashlib.sha256(data).hexdigest())


def test_prompts_on_the_command_line_are_requests_in_order(generate: Generate) -> None:
    words = ("--prompt", "Tom", "--prompt", "Ann has", "--max-tokens", "1", "-n", "2", "-o", "-")
    done = generate(*words, "--chat", "--ignore-eos", "--quiet", "--unverified", *SMALL)
    assert (done.code, done.err) == (0, "")
    lines = parsed(done.out)
    assert sorted((line["id"], line["sample"]) for line in lines) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert len({tuple(line["prompt_token_ids"]) for line in lines}) == 2


def test_refused_lines_become_error_lines_and_the_others_are_served(
    generate: Generate, tmp_path: Path
) -> None:
    write_lines(
        tmp_path / "in.jsonl",
        REQUEST,
        {"prompt_token_ids": []},
        "nonsense",
        {**REQUEST, "id": "b", "top_p": 1.5, "temprature": 1},
        REQUEST,
        {**REQUEST, "id": "c"},
    )
    done = generate("-i", "in.jsonl", "-o", "out.jsonl", *SMALL)
    assert done.code == 2
    errors = [(one["id"], one["error"]["kind"]) for one in done.lines() if "error" in one]
    assert errors == [
        (1, "empty_prompt"),
        (None, "bad_json"),
        ("b", "unknown_field"),
        ("a", "duplicate_id"),
    ]
    assert [one["id"] for one in done.lines() if "error" not in one] == ["a", "c"]
    assert 'where: in.jsonl, line 4 (id "b"), field top_p' in done.err
    assert done.err.count("error: ") == 5
    assert done.out.rstrip().endswith("refused 4")
    manifest = done.manifest()
    assert manifest["status"] == "complete"
    assert manifest["metrics"]["requests_refused"] == 4


def test_no_weights_are_loaded_where_every_line_is_refused(
    generate: Generate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "in.jsonl", {"prompt_token_ids": [-1]})

    def no_engine(*arguments: object, **options: object) -> None:
        raise AssertionError("an engine was built")

    monkeypatch.setattr(Engine, "__init__", no_engine)
    done = generate("-i", "in.jsonl", "-o", "out.jsonl", *SMALL)
    assert done.code == 2
    assert [line["error"]["kind"] for line in done.lines()] == ["out_of_vocabulary"]
    assert done.manifest()["metrics"]["output_tokens_per_s"] is None


def test_an_empty_input_gives_an_empty_output_and_a_warning(
    generate: Generate, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text("\n")
    done = generate("-i", "in.jsonl", "-o", "out.jsonl", *SMALL)
    assert (done.code, done.lines()) == (0, [])
    assert "warning: the input holds no requests" in done.err


def test_a_request_that_the_pool_cannot_hold_is_refused_alone(
    generate: Generate, tmp_path: Path
) -> None:
    """The pool lowers a derived max_model_len, which is known only once it is sized."""
    write_lines(tmp_path / "in.jsonl", {"prompt_token_ids": [5] * 1500}, REQUEST)
    done = generate("-i", "in.jsonl", "-o", "out.jsonl", "--kv-cache-memory-bytes", "1MiB")
    assert done.code == 2
    refused, served = done.lines()
    assert (refused["id"], refused["error"]["kind"]) == (0, "never_fits")
    assert served["id"] == "a"
    assert "error: the prompt has 1500 tokens" in done.err
    assert "where: in.jsonl, line 1, field prompt_token_ids" in done.err
    assert refused["error"]["where"] == "in.jsonl, line 1, field prompt_token_ids"


def test_a_field_to_keep_that_no_request_has_is_warned_of(
    generate: Generate, tmp_path: Path
) -> None:
    """A kept field keeps its JSON value; where a line lacks it, nothing is kept."""
    tree = {"x": [1, 2.5, None, "ü"]}
    write_lines(tmp_path / "in.jsonl", {**REQUEST, "tree": tree}, {**REQUEST, "id": "b"})
    done = generate("-i", "in.jsonl", "-o", "out.jsonl", "--keep", "tree", "--keep", "tre", *SMALL)
    assert done.code == 0
    assert {line["id"]: line["metadata"] for line in done.lines()} == {
        "a": {"tree": tree},
        "b": None,
    }
    warnings = [line for line in done.err.splitlines() if "--keep" in line]
    assert warnings == ["warning: no request has the field tre, which --keep names"]


def test_a_kept_field_and_the_metadata_may_not_disagree(generate: Generate, tmp_path: Path) -> None:
    lines = ({**REQUEST, "answer": "18", "metadata": {"answer": "19"}}, {**REQUEST, "id": "b"})
    write_lines(tmp_path / "in.jsonl", *lines)
    done = generate("-i", "in.jsonl", "-o", "out.jsonl", "--keep", "answer", *SMALL)
    assert done.code == 2
    assert "error: answer is a field to keep, and metadata holds another answer" in done.err
    assert [("error" in line, line["id"]) for line in done.lines()] == [(True, "a"), (False, "b")]


@pytest.mark.parametrize(
    ("line", "field", "kind"),
    [
        ({"prompt": ""}, "prompt", "empty_prompt"),
        ({"prompt": None}, None, "bad_field"),
        ({"messages": []}, "messages", "bad_field"),
        ({"prompt": "Tom", "prompt_token_ids": [5]}, "prompt_token_ids", "bad_field"),
    ],
)
def test_a_prompt_without_a_token_is_refused_by_line(
    generate: Generate, tmp_path: Path, line: dict[str, Any], field: str | None, kind: str
) -> None:
    write_lines(tmp_path / "in.jsonl", REQUEST, line)
    done = generate("-i", "in.jsonl", "-o", "out.jsonl", *SMALL)
    assert done.code == 2
    refused, served = done.lines()
    assert (refused["id"], refused["error"]["kind"], served["id"]) == (1, kind, "a")
    place = "in.jsonl, line 2" if field is None else f"in.jsonl, line 2, field {field}"
    assert (refused["sample"], refused["error"]["where"]) == (0, place)
    assert set(refused) == {"id", "sample", "error"}
    assert {"kind", "what", "where", "rule", "remedy"} <= set(refused["error"])


@pytest.mark.parametrize(
    "removed", [("chat_template.jinja",), ("chat_template.jinja", "tokenizer.json")]
)
def test_chat_without_a_template_is_refused_before_any_work(
    generate: Generate, tmp_path: Path, removed: tuple[str, ...]
) -> None:
    """Without --chat, text needs a tokenizer alone, and ids need neither."""
    model = tmp_path / "model"
    shutil.copytree(EMBEDDED_FOLDER, model)
    for name in removed:
        (model / name).unlink(missing_ok=True)
    config = model / "tokenizer_config.json"
    values = json.loads(config.read_text())
    values.pop("chat_template", None)
    config.write_text(json.dumps(values))
    write_lines(tmp_path / "in.jsonl", REQUEST, {**REQUEST, "id": "b"})
    words = ("-i", "in.jsonl", "-o", "out.jsonl", "--model", "model", *SMALL)
    done = generate(*words, "--chat")
    assert (done.code, done.files) == (2, {"in.jsonl"})
    assert done.err.startswith("error: the model model has no chat template\nwhere: option chat\n")
    done = generate(*words)
    assert done.code == 0
    assert {line["text"] is None for line in done.lines()} == {"tokenizer.json" in removed}
    asked = {"messages": [{"role": "user", "content": "Tom"}]}
    write_lines(tmp_path / "chat.jsonl", asked, {"prompt": "Tom", "max_tokens": 1})
    done = generate("-i", "chat.jsonl", "-o", "chat.out.jsonl", "--model", "model", *SMALL)
    kinds = [line.get("error", {}).get("kind") for line in done.lines("chat.out.jsonl")]
    assert kinds == ["bad_field", "bad_field" if "tokenizer.json" in removed else None]


@pytest.mark.parametrize("taken", ["out.jsonl", "out.jsonl.partial.json"])
def test_an_existing_output_is_refused_and_untouched(
    generate: Generate, tmp_path: Path, taken: str
) -> None:
    (tmp_path / taken).write_text("precious")
    done = generate("--prompt", "Tom", "-o", "out.jsonl")
    assert done.code == 2
    assert f"error: {taken} exists" in done.err
    assert (tmp_path / taken).read_text() == "precious"
    assert done.files == {taken}


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (("-i", "absent.jsonl"), "error: the input cannot be read: No such file"),
        (("-i", "-"), "error: --input and --prompt exclude each other"),
        (("--json", "-o", "-"), "error: --json without a path would mix"),
        (("--resume", "-o", "-"), "error: --resume has no output to finish"),
        (("-o", "no/such/folder.jsonl"), "error: folder no/such does not exist"),
        (("--top-p", "0"), "error: top_p 0 is out of range"),
        (("--model", "nothing/here"), 'error: model "nothing/here" was not found'),
    ],
)
def test_what_cannot_work_is_refused_and_nothing_is_written(
    generate: Generate, words: tuple[str, ...], first: str
) -> None:
    prompt = () if words[:2] == ("-i", "absent.jsonl") else ("--prompt", "Tom")
    output = () if "-o" in words else ("-o", "out.jsonl")
    done = generate(*prompt, *output, *words)
    assert (done.code, done.out, done.files) == (2, "", set())
    assert done.err.startswith(first)


def test_the_bare_manifest_goes_to_stdout_where_lines_go_to_a_file(
    generate: Generate, tmp_path: Path
) -> None:
    write_lines(tmp_path / "in.jsonl", REQUEST)
    done = generate("-i", "in.jsonl", "-o", "out.jsonl", "--json", *SMALL)
    assert json.loads(done.out) == done.manifest()


def test_what_a_model_without_a_tokenizer_cannot_serve_is_refused_before_weights(
    generate: Generate, tmp_path: Path
) -> None:
    """Also from a default of the command line; the refusal needs no engine."""
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(EMBEDDED_FOLDER / name, plain / name)
    write_lines(tmp_path / "in.jsonl", {**REQUEST, "stop": "7"})
    done = generate("-i", "in.jsonl", "-o", "out.jsonl", "--model", "plain", *SMALL)
    assert done.code == 2
    (line,) = done.lines()
    assert line["error"]["where"] == 'in.jsonl, line 1 (id "a"), field stop'
    assert "no tokenizer.json" in line["error"]["what"]
    assert done.manifest()["memory"] == []


def test_a_request_that_fails_mid_run_keeps_its_tokens_and_says_where_it_broke(
    generate: Generate, tmp_path: Path
) -> None:
    """huggingface/trl#6166: it fails by its id; a rerun names the first op at fault."""
    shutil.copytree(EMBEDDED_FOLDER, tmp_path / "poisoned")
    weights = load_file(EMBEDDED_FOLDER / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][9] = torch.nan
    save_file(weights, tmp_path / "poisoned" / "model.safetensors", metadata={"format": "pt"})
    forced = {**REQUEST, "id": "b", "allowed_token_ids": [9]}
    write_lines(tmp_path / "in.jsonl", REQUEST, forced)
    done = generate("-i", "in.jsonl", "-o", "out.jsonl", "--model", "poisoned", *SMALL)
    assert done.code == 2
    lines = {line["id"]: line for line in done.lines()}
    assert "error" not in lines["a"]
    assert lines["b"]["error"]["kind"] == "non_finite"
    assert lines["b"]["token_ids"] == [9]
    assert len(lines["b"]["logprobs"]) == 1
    assert "error: the logits held NaN" in done.err
    hint = "the first value that is not finite is an output of embedding, token 3"
    assert f"warning: {hint} (request b, sample 0)" in done.err
    manifest = done.manifest()
    assert manifest["metrics"]["requests_failed"] == 1
    assert {"code": "fault_location", "where": "request b, sample 0", "text": hint} in manifest[
        "warnings"
    ]


def test_ctrl_c_keeps_whole_lines_and_closes_the_manifest(
    generate: Generate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "in.jsonl", {**REQUEST, "max_tokens": 1}, {**REQUEST, "id": "b"})
    step = Engine.step
    seen: list[set[str]] = []

    def interrupted_step(engine: Engine) -> list[Completion]:
        if engine.stats().steps == 2:
            seen.append({path.name for path in tmp_path.iterdir()})
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted_step)
    done = generate("-i", "in.jsonl", "-o", "out.jsonl", *SMALL)
    assert done.code == 130
    assert [line["id"] for line in done.lines()] == ["a"]
    manifest = done.manifest()
    assert manifest["status"] == "interrupted"
    assert [one["role"] for one in manifest["files"]] == ["input", "output"]
    assert seen == [{"in.jsonl", "out.jsonl", "out.jsonl.partial.json"}]
    assert done.files == {*seen[0], "out.jsonl.manifest.json"}


def test_a_broken_model_fails_with_a_manifest_and_without_an_output(
    generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = generate("--prompt", "Tom", "-o", "out.jsonl", "--kv-cache-memory-bytes", "1")
    assert done.code == 2
    assert done.manifest()["status"] == "failed"
    assert done.files == {"out.jsonl.manifest.json"}


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_signal_leaves_whole_lines_and_the_runs_header(
    tmp_path: Path, clean_environ: dict[str, str], number: signal.Signals, code: int
) -> None:
    """An end by Ctrl-C has a manifest too; a kill leaves the header alone."""
    write_lines(
        tmp_path / "in.jsonl",
        {**REQUEST, "max_tokens": 1},
        {**REQUEST, "id": "b", "max_tokens": 2000, "n": 8},
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "pagedctl", "generate", "-i", "in.jsonl", "-o", "out.jsonl", "-q"],
        cwd=tmp_path,
        env=clean_environ,
        stdin=subprocess.DEVNULL,
    )
    output = tmp_path / "out.jsonl"
    deadline = time.monotonic() + 100
    while not output.exists() or b"\n" not in output.read_bytes():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(timeout=60) == code
    assert [line["id"] for line in parsed(output.read_text())] == ["a"]
    partial, manifest = (tmp_path / f"out.jsonl.{end}.json" for end in ("partial", "manifest"))
    assert manifest.exists() == (number == signal.SIGINT)
    for left in (partial, manifest) if manifest.exists() else (partial,):
        found = json.loads(left.read_bytes())
        assert (found["status"], found["config"]["input"]) == ("interrupted", "in.jsonl")
        assert found["model"]["name"] == "embedded"


def test_a_terminal_gets_text_and_is_not_read(
    tmp_path: Path, clean_environ: dict[str, str]
) -> None:
    """Text on a terminal; without an input, a terminal as stdin is refused at once."""
    primary, secondary = pty.openpty()
    words = ["--prompt", "Tom has 3", "--max-tokens", "3", "--unverified", "--quiet", *SMALL]
    done = subprocess.run(
        [sys.executable, "-m", "pagedctl", "generate", *words],
        cwd=tmp_path,
        env=clean_environ,
        stdin=secondary,
        stdout=secondary,
        stderr=subprocess.PIPE,
        timeout=120,
        check=False,
    )
    os.write(secondary, b"<end>")
    shown = ""
    while "<end>" not in shown:
        shown += os.read(primary, 1 << 16).decode()
    assert (done.returncode, done.stderr) == (0, b"")
    assert shown.endswith("\r\n<end>")
    assert "{" not in shown
    refused = subprocess.run(
        [sys.executable, "-m", "pagedctl", "generate"],
        cwd=tmp_path,
        env=clean_environ,
        stdin=secondary,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(primary)
    os.close(secondary)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: there is nothing to complete")


def test_a_full_disk_is_refused_and_leaves_whole_lines(
    generate: Generate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a line that was written before the disk was full is taken back."""
    write_lines(tmp_path / "in.jsonl", {**REQUEST, "max_tokens": 1}, {**REQUEST, "id": "b"})
    write, claim = os.write, files.claim
    ours: list[int] = []
    written: list[bytes] = []

    def filling_write(descriptor: int, data: bytes) -> int:
        if descriptor not in ours:
            return write(descriptor, data)
        written.append(data)
        if len(written) == 2:
            return write(descriptor, data[:10])
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    def claimed(path: Path, option: str, **options: bool) -> files.Claim:
        found = claim(path, option, **options)
        ours.append(found.descriptor)
        return found

    monkeypatch.setattr(files, "claim", claimed)
    monkeypatch.setattr(os, "write", filling_write)
    done = generate("-i", "in.jsonl", "-o", "out.jsonl", "--json", "m.json", *SMALL)
    assert done.code == 2
    assert "error: cannot write out.jsonl: No space left on device" in done.err
    assert [line["id"] for line in done.lines()] == ["a"]


def test_the_first_error_wins_where_the_disk_is_full_for_the_manifest_too(
    generate: Generate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "in.jsonl", REQUEST)
    append = FileOutput.append_line

    def full(output: FileOutput, line: bytes) -> None:
        def no_room(path: Path, data: bytes, **options: object) -> None:
            raise ConfigError(f"cannot write {path}", where="w", rule="r", remedy="m")

        def no_write(descriptor: int, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(files, "write_new", no_room)
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", no_write)
            append(output, line)

    monkeypatch.setattr(FileOutput, "append_line", full)
    done = generate("-i", "in.jsonl", "-o", "out.jsonl", *SMALL)
    assert done.code == 2
    assert "error: cannot write out.jsonl: No space left on device" in done.err
    assert "warning: there is no manifest: cannot write out.jsonl.manifest.json" in done.err
    assert done.err.count("error: ") == 1


def test_an_interrupted_run_counts_whole_requests_and_all_tokens(
    generate: Generate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "in.jsonl", {**REQUEST, "max_tokens": 1}, {**REQUEST, "id": "b"})
    step = Engine.step

    def interrupted_step(engine: Engine) -> list[Completion]:
        if engine.stats().steps == 2:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted_step)
    done = generate("-i", "in.jsonl", "-o", "out.jsonl", *SMALL)
    assert (done.code, done.err.splitlines()[-2]) == (130, "interrupted")
    metrics = done.manifest()["metrics"]
    assert (metrics["requests_completed"], metrics["prompt_tokens"]) == (1, 3)
    assert (metrics["output_tokens"], metrics["output_tokens_unfinished"]) == (3, 2)
    assert metrics["kv_tokens"] > 0
    assert metrics["max_concurrency_at_cap"] > 0


@pytest.mark.parametrize(
    ("output", "manifest"),
    [
        ("X", "X"),
        ("X", "./X"),
        ("X", "X.partial.json"),
        ("here/X", "X"),
    ],
)
def test_two_files_at_one_path_are_refused_before_any_work(
    generate: Generate, tmp_path: Path, output: str, manifest: str
) -> None:
    (tmp_path / "here").symlink_to(tmp_path)
    done = generate("--prompt", "Tom", "-o", output, "--json", manifest, "--model", "absent")
    assert (done.code, done.files) == (2, set())
    assert "would be written twice" in done.err.splitlines()[0]


def test_of_two_runs_at_once_on_one_output_one_is_refused_and_leaves_nothing(
    tmp_path: Path, clean_environ: dict[str, str]
) -> None:
    """Both are past the first look at the path before either claims it."""
    script = (
        "import sys, time\n"
        "from pagedctl.cli import generate\n"
        "from pagedctl.cli.main import main\n"
        "job_of = generate.job_of\n"
        "def late(session):\n"
        "    job = job_of(session)\n"
        "    print('ready', flush=True); sys.stdin.readline()\n"
        "    return job\n"
        "generate.job_of = late\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    words = ["generate", "--prompt", "Tom", "--max-tokens", "4", "-o", "out.jsonl", *SMALL]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, *words],
            cwd=tmp_path,
            env=clean_environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stderr is not None
        while process.stderr.readline() != "ready\n":
            assert process.poll() is None
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    talks = [process.communicate(timeout=120)[1] for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 2]
    loser = next(
        talk for process, talk in zip(processes, talks, strict=True) if process.returncode == 2
    )
    assert loser.startswith("error: out.jsonl exists\n")
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {
        "out.jsonl",
        "out.jsonl.manifest.json",
    }
    (line,) = parsed((tmp_path / "out.jsonl").read_text())
    assert "token_ids" in line


def test_text_on_a_terminal_shares_it_with_no_bar(
    tmp_path: Path, clean_environ: dict[str, str]
) -> None:
    primary, secondary = pty.openpty()
    words = ["--prompt", "Tom has 3", "--max-tokens", "3", "--unverified", *SMALL]
    done = subprocess.run(
        [sys.executable, "-m", "pagedctl", "generate", *words],
        cwd=tmp_path,
        env={**clean_environ, "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=secondary,
        stderr=secondary,
        timeout=120,
        check=False,
    )
    os.write(secondary, b"<end>")
    shown = ""
    while "<end>" not in shown:
        shown += os.read(primary, 1 << 16).decode()
    os.close(primary)
    os.close(secondary)
    assert done.returncode == 0
    assert "\x1b" not in shown
