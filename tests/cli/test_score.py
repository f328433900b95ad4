"""``pagedctl score``: files, streams, refusals, and logprobs compared bit for bit."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import pagedctl.models
from pagedctl.cli import score_comparison
from pagedctl.cli.main import main
from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine import score_lines
from pagedctl.engine.completion_lines import completion_line
from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Request, SamplingParams
from pagedctl.engine.score_fields import GivenSequence

SMALL = ("--kv-cache-memory-bytes", "16MiB")
EMBEDDED = Path(pagedctl.models.__file__).parent / "embedded"
PROMPTS = [tuple(5 + (7 * one + place) % 300 for place in range(3 + 2 * one)) for one in range(8)]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "greedy": {"temperature": 0.0},
    "cold": {"temperature": 0.7, "n": 3},
    "sharp": {"temperature": 0.002},
    "cut": {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "ended": {"stop_token_ids": (20, 21, 224)},
    "stopped": {"stop": ("1", " ="), "temperature": 0.7},
    "penalised": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": ((20, 5.0),),
        "min_tokens": 4,
    },
    "reported": {"top_logprobs": 3, "prompt_logprobs": True},
}
Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Done:
    """What one run left behind."""

    code: int
    out: str
    err: str
    folder: Path

    def lines(self, name: str = "s.jsonl") -> dict[tuple[Any, int], Line]:
        found = parsed((self.folder / name).read_text())
        return {(line["id"], line["sample"]): line for line in found}

    def manifest(self, name: str = "s.jsonl.manifest.json") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / name).read_bytes())
        return found

    @property
    def files(self) -> set[str]:
        return {path.name for path in self.folder.iterdir() if path.is_file()}


Score = Callable[..., Done]


@pytest.fixture
def score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Score]:
    """Run the command in this process, in an empty folder, with *stdin* as its input."""
    for name in [name for name in os.environ if name.startswith("PAGEDCTL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("PAGEDCTL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    on_term, stdin = signal.getsignal(signal.SIGTERM), os.dup(0)

    def run(*words: str, stdin: bytes = b"") -> Done:
        reader, writer = os.pipe()
        os.write(writer, stdin)
        os.close(writer)
        os.dup2(reader, 0)
        os.close(reader)
        capfd.readouterr()
        code = main(["score", *SMALL, *words])
        out, err = capfd.readouterr()
        return Done(code=code, out=out, err=err, folder=tmp_path)

    yield run
    os.dup2(stdin, 0)
    os.close(stdin)
    signal.signal(signal.SIGTERM, on_term)


def completions(**options: Any) -> list[Line]:
    """What the engine answers to every prompt under every sampling, as completion lines."""
    requests = [
        Request(
            id=f"{name} {place}",
            prompt_token_ids=prompt,
            params=SamplingParams(**{"max_tokens": 12 + place, "seed": place, **params}),
        )
        for name, params in SAMPLINGS.items()
        for place, prompt in enumerate(PROMPTS)
    ]
    with Engine(EngineConfig(kv_cache_memory_bytes=16 << 20, **options)) as engine:
        return [json.loads(completion_line(one)) for one in engine.generate(requests)]


@pytest.fixture(scope="module")
def generated() -> list[Line]:
    return completions()


def parsed(text: str) -> list[Line]:
    assert not text or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def write_lines(path: Path, lines: Sequence[Line | str]) -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")


def next_float32(value: float) -> float:
    """One step towards 0, as a line would have it."""
    return float(str(np.nextafter(np.float32(value), np.float32(0), dtype=np.float32)))


def tampered(line: Line, place: int, value: float) -> Line:
    logprobs = [*line["logprobs"]]
    logprobs[place] = value
    return {**line, "logprobs": logprobs}


# -- a check that holds ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--chunk-size", "5", "--block-size", "4", "--no-prefix-cache"),
        ("--max-num-batched-tokens", "7", "--max-num-seqs", "3", "--lag", "1"),
        ("--chunk-size", "4", "--debug-force-preemption-interval", "2"),
    ],
)
def test_completions_rescored_in_other_batches_have_equal_bits(
    score: Score, tmp_path: Path, generated: list[Line], words: tuple[str, ...]
) -> None:
    """Every sampling, several samples, stops and forced preemptions."""
    assert {line["finish_reason"] for line in generated} == {"stop", "length"}
    assert any(isinstance(line["stop_reason"], str) for line in generated)
    write_lines(tmp_path / "in.jsonl", generated)
    done = score("-i", "in.jsonl", "--check", "--json", "m.json", *words)
    assert (done.code, done.files) == (0, {"in.jsonl", "m.json"})
    num_lines = len(generated)
    assert num_lines == (len(SAMPLINGS) + 2) * len(PROMPTS)
    assert done.out.startswith(f"{num_lines} sequences · ")
    assert done.out.endswith(f" · equal {num_lines} of {num_lines}\n")
    assert done.err == "manifest: m.json\n"  # no record is needed to check
    manifest = done.manifest("m.json")
    text = f"equal {num_lines} of {num_lines}"
    assert (manifest["command"], manifest["status"]) == ("score", "complete")
    assert manifest["verdict"] == {"holds": True, "text": text}
    assert manifest["config"]["check"] is True
    metrics = manifest["metrics"]
    tokens = sum(len(line["token_ids"]) for line in generated)
    assert metrics["scored_tokens"] == metrics["tokens_compared"] == tokens
    assert metrics["prompt_tokens"] == sum(len(line["prompt_token_ids"]) for line in generated)
    assert metrics["scored_tokens_per_s"] == pytest.approx(tokens / metrics["wall_s"])
    assert (metrics["requests_equal"], metrics["requests_differing"]) == (num_lines, 0)
    assert (metrics["tokens_differing"], metrics["first_difference"]) == (0, None)
    assert (metrics["preemptions"] > 0) == ("--debug-force-preemption-interval" in words)


def test_raw_logprobs_are_checked_as_those_of_temperature_1(score: Score, tmp_path: Path) -> None:
    """vllm-project/vllm#7753's default basis, made at any temperature."""
    lines = completions(logprob_basis="raw")
    assert {line["temperature"] for line in lines} == {0.0, 0.002, 0.7, 1.0}
    write_lines(tmp_path / "in.jsonl", lines)
    for words in ((), ("--logprob-basis", "raw")):
        done = score("-i", "in.jsonl", "--check", *words)
        assert (done.code, done.out.endswith(f"equal {len(lines)} of {len(lines)}\n")) == (0, True)


def test_generate_pipes_into_a_check(tmp_path: Path, clean_environ: dict[str, str]) -> None:
    words = ["--temperature", "0.7", "-n", "4", "--max-tokens", "24", "--seed", "3", *SMALL]
    prompts = ["--prompt", "Tom has 3 apples and buys 4. How many?", "--prompt", "Ann has 9"]
    generate = subprocess.Popen(
        [sys.executable, "-m", "pagedctl", "generate", *prompts, *words],
        cwd=tmp_path,
        env=clean_environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    check = subprocess.run(
        [sys.executable, "-m", "pagedctl", "score", "--check", "--chunk-size", "3", *SMALL],
        cwd=tmp_path,
        env=clean_environ,
        stdin=generate.stdout,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert generate.stdout is not None
    generate.stdout.close()
    assert (generate.wait(timeout=60), check.returncode) == (0, 0)
    assert check.stdout.startswith("8 sequences · ")
    assert check.stdout.endswith(" · equal 8 of 8\n")


# -- a check that does not hold --------------------------------------------------------------


def test_one_ulp_is_found_and_named(score: Score, tmp_path: Path, generated: list[Line]) -> None:
    """vllm-project/vllm#32480: equality on float32, the first divergent place reported."""
    lines = [*generated]
    places = {9: 4, 5: 2}
    for number, place in places.items():
        lines[number] = tampered(
            lines[number], place, next_float32(lines[number]["logprobs"][place])
        )
    lines[30] = tampered(lines[30], 0, -50.0)
    write_lines(tmp_path / "in.jsonl", lines)
    done = score("-i", "in.jsonl", "--check", "--max-num-seqs", "2", "--json", "m.json")
    assert done.code == 1
    first, honest = lines[5], generated[5]
    position = len(first["prompt_token_ids"]) + 2
    expected = {
        "id": first["id"],
        "sample": first["sample"],
        "position": position,
        "token_id": first["token_ids"][2],
        "line_logprob": first["logprobs"][2],
        "scored_logprob": honest["logprobs"][2],
        "ulps": 1,
    }
    manifest, total = done.manifest("m.json"), len(lines)
    assert manifest["verdict"] == {"holds": False, "text": f"equal {total - 3} of {total}"}
    assert manifest["metrics"]["first_difference"] == expected
    assert manifest["metrics"]["tokens_differing"] == 3
    assert manifest["metrics"]["max_ulps"] > 1000
    difference, summary = done.out.splitlines()
    assert difference.startswith(f'first difference: id "{first["id"]}", sample 0, ')
    assert f"position {position}, token {first['token_ids'][2]}: the line has " in difference
    assert difference.endswith(", ulps 1")
    assert summary.endswith(f" · equal {total - 3} of {total}")


def with_negative_zero(lines: list[Line]) -> list[Line]:
    """The first logprob that is exactly 0, written as -0."""
    number = next(one for one, line in enumerate(lines) if 0.0 in line["logprobs"])
    place = lines[number]["logprobs"].index(0.0)
    changed = [*lines]
    changed[number] = tampered(lines[number], place, -0.0)
    return changed


def test_a_zero_of_another_sign_is_another_number(
    score: Score, tmp_path: Path, generated: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits are compared: a comparison of values, the mutant, does not see it."""
    lines = with_negative_zero(generated)
    write_lines(tmp_path / "in.jsonl", lines)
    done = score("-i", "in.jsonl", "--check", "--json", "m.json")
    assert done.code == 1
    found = done.manifest("m.json")["metrics"]["first_difference"]
    assert [str(found[name]) for name in ("line_logprob", "scored_logprob")] == ["-0.0", "0.0"]
    assert found["ulps"] == 1
    compared: list[int] = []

    def values(floats: Any) -> Any:
        compared.append(len(floats))
        return floats

    monkeypatch.setattr(score_comparison, "bits", values)
    assert score("-i", "in.jsonl", "--check").code == 0
    assert compared


def test_a_start_that_is_off_by_one_cannot_pass(
    score: Score, tmp_path: Path, generated: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in a line nor in the reader: logprobs shifted by one token, or one too many."""
    honest_lines, shifted = [], []
    for number, line in enumerate(generated):
        if line["temperature"] == 0.002 or len(line["token_ids"]) == 1:
            continue  # logprobs that are 0 wherever one looks, or too few to shift
        ids, start = line["prompt_token_ids"] + line["token_ids"], len(line["prompt_token_ids"])
        own = {"id": number, "token_ids": ids, "temperature": line["temperature"]}
        honest_lines.append({**own, "start": start, "logprobs": line["logprobs"]})
        shifted.append({**own, "start": start + 1, "logprobs": line["logprobs"][:-1]})
    write_lines(tmp_path / "honest.jsonl", honest_lines)
    assert score("-i", "honest.jsonl", "--check").code == 0
    write_lines(tmp_path / "shifted.jsonl", shifted)
    done = score("-i", "shifted.jsonl", "--check", "--json", "m.json")
    assert (done.code, done.manifest("m.json")["metrics"]["requests_equal"]) == (1, 0)

    sequence_of, reached = score_lines.sequence_of, []

    def earlier(*arguments: Any) -> GivenSequence | None:
        found = sequence_of(*arguments)
        assert found is not None
        reached.append(found)
        return GivenSequence(token_ids=found.token_ids, start=found.start - 1)

    write_lines(tmp_path / "in.jsonl", generated)
    monkeypatch.setattr(score_lines, "sequence_of", earlier)
    done = score("-i", "in.jsonl", "--check", "--json", "n.json")
    assert (done.code, done.manifest("n.json")["metrics"]["requests_refused"]) == (2, len(reached))


def test_a_difference_decides_also_where_a_line_has_no_answer(
    score: Score, tmp_path: Path, generated: list[Line]
) -> None:
    """Without a difference, a check of most lines is no answer."""
    lines: list[Line | str] = [*generated[:3], "nonsense", {**generated[3], "logprobs": None}]
    write_lines(tmp_path / "in.jsonl", lines)
    done = score("-i", "in.jsonl", "--check", "--json", "m.json")
    assert done.code == 2
    assert done.manifest("m.json")["verdict"] == {"holds": None, "text": "equal 3 of 5"}
    assert done.out.endswith(" · refused 2 · equal 3 of 5\n")
    assert "error: the line has no logprobs" in done.err
    write_lines(tmp_path / "in.jsonl", [tampered(generated[0], 0, -9.0), *lines[1:]])
    assert score("-i", "in.jsonl", "--check").code == 1


@pytest.mark.parametrize(
    "data", [b"", b'{"id": "a", "sample": 0, "error": {"kind": "too_long"}}\n']
)
def test_a_check_of_nothing_has_no_answer(score: Score, data: bytes) -> None:
    """A generator that died before its first line must not pass for a proof."""
    done = score("--check", "--json", "m.json", stdin=data)
    assert done.code == 2
    assert done.manifest("m.json")["verdict"] == {"holds": None, "text": "equal 0 of 0"}
    assert "warning: the input holds nothing to score" in done.err
    assert ("warning: skipped 1 error line without tokens" in done.err) == bool(data)
    assert ("skipped 1" in done.out) == bool(data)


# -- scores ----------------------------------------------------------------------------------


def test_a_file_of_sequences_becomes_a_file_of_scores(score: Score, tmp_path: Path) -> None:
    ids = [5, 6, 7, 8, 9]
    lines = [
        {"id": "own", "sample": 2, "token_ids": ids, "start": 1, "temperature": 0.5},
        {"token_ids": ids},
        {"id": "q", "sample": 1, "prompt_token_ids": ids[:4], "token_ids": ids[4:]},
        {"id": "cold", "token_ids": ids, "temperature": 0},
    ]
    write_lines(tmp_path / "in.jsonl", lines)
    words = ("--start", "3", "--temperature", "2")
    done = score("-i", "in.jsonl", "-o", "s.jsonl", *words)
    assert (done.code, done.files) == (0, {"in.jsonl", "s.jsonl", "s.jsonl.manifest.json"})
    found = done.lines()
    assert {key: (one["start"], one["temperature"]) for key, one in found.items()} == {
        ("own", 2): (1, 0.5),
        (1, 0): (3, 2.0),
        ("q", 1): (4, 2.0),
        ("cold", 0): (3, 0.0),
    }
    for one in found.values():
        assert set(one) == {
            *("id", "sample", "start", "temperature", "logprob_basis", "logprobs"),
            *("weight_version_first", "weight_version_last"),
        }
        assert (one["logprob_basis"], len(one["logprobs"])) == ("scaled", 5 - one["start"])
    assert found["q", 1]["logprobs"] == found[1, 0]["logprobs"][1:]
    whole = np.array(found["own", 2]["logprobs"][2:])
    assert not np.allclose(whole, found[1, 0]["logprobs"])
    manifest = done.manifest()
    assert manifest["verdict"] is None
    assert (manifest["config"]["start"], manifest["config_origin"]["start"]) == (3, "flag")
    assert manifest["metrics"]["scored_tokens"] == 4 + 2 + 1 + 2
    assert "requests_differing" not in manifest["metrics"]
    for role, name in (("input", "in.jsonl"), ("output", "s.jsonl")):
        data = (tmp_path / name).read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        entry = {"role": role, "path": name, "sha256": digest, "bytes": len(data)}
        assert entry in manifest["files"]
    assert "warning" not in done.err
    assert done.out.startswith("4 sequences · 9 tokens scored · ")


def test_scores_of_a_whole_sequence_are_what_generation_reported(
    score: Score, tmp_path: Path, generated: list[Line]
) -> None:
    """vllm-project/vllm#3251: of the prompt, prompt - 1 of them, then of the tokens sampled."""
    lines = [line for line in generated if "prompt_logprobs" in line]
    whole = [
        {"id": number, "token_ids": line["prompt_token_ids"] + line["token_ids"]}
        for number, line in enumerate(lines)
    ]
    write_lines(tmp_path / "in.jsonl", whole)
    done = score("-i", "in.jsonl")
    found = {line["id"]: line["logprobs"] for line in parsed(done.out)}
    assert found == {
        number: line["prompt_logprobs"] + line["logprobs"] for number, line in enumerate(lines)
    }
    assert len(found) == len(PROMPTS)


def test_stdin_to_stdout_has_nothing_but_lines_on_stdout(score: Score) -> None:
    data = gzip.compress(b'{"id": "a", "token_ids": [5, 6]}\r\n')
    done = score("--json", "m.json", stdin=data)
    assert done.code == 0
    (line,) = parsed(done.out)
    assert (line["id"], len(line["logprobs"])) == ("a", 1)
    summary, note = done.err.splitlines()[-2:]
    assert summary.startswith("1 sequence · 1 token scored · ")
    assert note == "manifest: m.json"
    (entry,) = done.manifest("m.json")["files"]
    assert (entry["path"], entry["sha256"]) == ("stdin", hashlib.sha256(data).hexdigest())


def test_a_check_can_write_the_scores_too(
    score: Score, tmp_path: Path, generated: list[Line]
) -> None:
    write_lines(tmp_path / "in.jsonl", generated[:2])
    done = score("-i", "in.jsonl", "--check", "-o", "s.jsonl")
    assert (done.code, len(done.lines())) == (0, 2)
    assert done.out.endswith(" · equal 2 of 2\n")
    done = score("-i", "in.jsonl", "--check", "-o", "-")
    assert {line["id"] for line in parsed(done.out)} == {line["id"] for line in generated[:2]}
    assert done.err.splitlines()[-2].endswith(" · equal 2 of 2")


def test_the_bare_manifest_goes_to_stdout_where_no_lines_do(
    score: Score, tmp_path: Path, generated: list[Line]
) -> None:
    write_lines(tmp_path / "in.jsonl", generated[:2])
    done = score("-i", "in.jsonl", "--check", "--json")
    assert json.loads(done.out)["verdict"] == {"holds": True, "text": "equal 2 of 2"}
    done = score("-i", "in.jsonl", "-o", "s.jsonl", "--json")
    assert json.loads(done.out) == done.manifest()


# -- lines and runs without an answer --------------------------------------------------------


def test_bad_lines_become_error_lines_and_the_others_are_scored(
    score: Score, tmp_path: Path
) -> None:
    write_lines(
        tmp_path / "in.jsonl",
        [
            {"id": "a", "token_ids": [5, 6]},
            {"token_ids": []},
            "nonsense",
            {"id": "b", "sample": 3, "token_ids": [5, 99999], "strat": 1},
            {"id": "a", "token_ids": [5]},
            {"id": "e", "sample": 0, "error": {"kind": "bad_field"}},
            {"id": "c", "token_ids": [5, 6], "start": 3},
        ],
    )
    done = score("-i", "in.jsonl", "-o", "s.jsonl")
    assert done.code == 2
    found = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    errors = [(one["id"], one["sample"], one["error"]["kind"]) for one in found if "error" in one]
    assert errors == [
        (1, 0, "empty_prompt"),
        (None, 0, "bad_json"),
        ("b", 3, "unknown_field"),
        ("a", 0, "duplicate_id"),
        ("c", 0, "bad_field"),
    ]
    assert [one["id"] for one in found if "logprobs" in one] == ["a"]
    assert 'where: in.jsonl, line 4 (id "b", sample 3), field token_ids' in done.err
    assert done.err.count("error: ") == 6
    assert done.out.rstrip().endswith(" · refused 5 · skipped 1")
    metrics = done.manifest()["metrics"]
    assert (metrics["requests_refused"], metrics["lines_skipped"]) == (5, 1)


def test_no_weights_are_loaded_where_every_line_is_refused(
    score: Score, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_engine(*arguments: object, **options: object) -> None:
        raise AssertionError("an engine was built")

    monkeypatch.setattr(Engine, "__init__", no_engine)
    done = score("-o", "s.jsonl", stdin=b'{"token_ids": [-1]}\n')
    assert done.code == 2
    assert [line["error"]["kind"] for line in done.lines().values()] == ["out_of_vocabulary"]
    assert done.manifest()["metrics"]["scored_tokens_per_s"] is None


def test_the_command_loads_torch_only_for_an_engine() -> None:
    code = "import sys, pagedctl.cli.score; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_empty_input_gives_an_empty_output_and_a_warning(score: Score) -> None:
    done = score("-o", "s.jsonl", stdin=b"\n")
    assert (done.code, done.lines()) == (0, {})
    assert "warning: the input holds nothing to score" in done.err


def test_a_sequence_that_the_pool_cannot_hold_is_refused_alone(
    score: Score, tmp_path: Path
) -> None:
    """The pool lowers a derived max_model_len, which is known only once it is sized."""
    write_lines(tmp_path / "in.jsonl", [{"token_ids": [5] * 1500}, {"token_ids": [5, 6]}])
    done = score("-i", "in.jsonl", "-o", "s.jsonl", "--kv-cache-memory-bytes", "1MiB")
    assert done.code == 2
    refused, scored = done.lines()[0, 0], done.lines()[1, 0]
    assert refused["error"]["where"] == "in.jsonl, line 1, field token_ids"
    assert len(scored["logprobs"]) == 1
    assert "error: the sequence has 1500 tokens" in done.err


def test_a_sequence_with_a_faulty_token_fails_alone(score: Score, tmp_path: Path) -> None:
    """huggingface/trl#6166: NaN is never laundered; the others keep their bits."""
    lines = [{"id": name, "token_ids": ids} for name, ids in (("a", [5, 6]), ("b", [5, 9, 6]))]
    write_lines(tmp_path / "in.jsonl", lines)
    healthy = score("-i", "in.jsonl", "-o", "healthy.jsonl").lines("healthy.jsonl")
    shutil.copytree(EMBEDDED, tmp_path / "poisoned")
    weights = load_file(EMBEDDED / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][9] = torch.nan
    save_file(weights, tmp_path / "poisoned" / "model.safetensors", metadata={"format": "pt"})
    done = score("-i", "in.jsonl", "-o", "s.jsonl", "--model", "poisoned")
    assert done.code == 2
    assert done.lines()["a", 0] == healthy["a", 0]
    failed = done.lines()["b", 0]
    assert set(failed) == {"id", "sample", "error"}
    assert failed["error"]["kind"] == "non_finite"
    assert failed["error"]["where"] == 'in.jsonl, line 2 (id "b")'
    assert done.manifest()["metrics"]["requests_failed"] == 1
    assert "failed 1" in done.out


@pytest.mark.parametrize("taken", ["s.jsonl", "s.jsonl.partial.json", "s.jsonl.manifest.json"])
def test_an_existing_output_is_refused_and_untouched(
    score: Score, tmp_path: Path, taken: str
) -> None:
    (tmp_path / taken).write_text("precious")
    done = score("-o", "s.jsonl", stdin=b'{"token_ids": [5, 6]}\n')
    assert (done.code, done.files) == (2, {taken})
    assert f"error: {taken} exists" in done.err
    assert (tmp_path / taken).read_text() == "precious"


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (("--logprob-basis", "processed"), "error: score has no logprobs of basis processed"),
        (("-i", "absent.jsonl"), "error: the input cannot be read: No such file"),
        (("--json", "-o", "-"), "error: --json without a path would mix"),
        (("--json", "s.jsonl"), "error: s.jsonl would be written twice"),
        (("-o", "no/such/folder.jsonl"), "error: folder no/such does not exist"),
        (("--start", "0"), "error: start 0 is out of range"),
        (("--temperature", "-1"), "error: temperature -1 is out of range"),
        (("--top-p", "1"), "error: --top-p is not a flag of this command"),
        (("--model", "nothing/here"), 'error: model "nothing/here" was not found'),
    ],
)
def test_what_cannot_work_is_refused_and_nothing_is_written(
    score: Score, words: tuple[str, ...], first: str
) -> None:
    output = () if "-o" in words else ("-o", "s.jsonl")
    done = score(*output, *words, stdin=b'{"token_ids": [5, 6]}\n')
    assert (done.code, done.out, done.files) == (2, "", set())
    assert done.err.startswith(first)


def test_a_terminal_is_not_read(tmp_path: Path, clean_environ: dict[str, str]) -> None:
    primary, secondary = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "pagedctl", "score"],
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
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is nothing to score")


@pytest.mark.parametrize("check", [True, False])
def test_ctrl_c_keeps_whole_lines_and_closes_the_manifest(
    score: Score,
    tmp_path: Path,
    generated: list[Line],
    monkeypatch: pytest.MonkeyPatch,
    check: bool,
) -> None:
    write_lines(tmp_path / "in.jsonl", generated[:6])
    scores, seen = Engine.scores, []

    def interrupted(engine: Engine, requests: Any) -> Any:
        for number, found in enumerate(scores(engine, requests)):
            if number == 2:
                seen.append({path.name for path in tmp_path.iterdir() if path.is_file()})
                raise KeyboardInterrupt
            yield found

    monkeypatch.setattr(Engine, "scores", interrupted)
    words = ("--check",) if check else ()
    done = score("-i", "in.jsonl", "-o", "s.jsonl", "--max-num-seqs", "1", *words)
    assert done.code == 130
    assert len(done.lines()) == 2
    manifest = done.manifest()
    assert manifest["status"] == "interrupted"
    assert manifest["verdict"] == ({"holds": None, "text": "equal 2 of 6"} if check else None)
    assert [one["role"] for one in manifest["files"]] == ["input", "output"]
    assert seen == [{"in.jsonl", "s.jsonl", "s.jsonl.partial.json"}]
