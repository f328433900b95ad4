"""``pagedctl invariance`` as a person and a CI job run it.

What it finds in a broken engine, op by op, is in ``tests/verify/test_command_mutants.py``.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedctl.cli.main import main
from pagedctl.manifest.reader import read_manifest
from pagedctl.numerics.records import read_record
from pagedctl.verify import power_check
from pagedctl_kernels.ops.logprob.torch_reference import TorchLogprob
from tests.conftest import Cli, python_path
from tests.reference.tiny_models import tiny_model

SMALL = ("--requests", "2", "--max-tokens", "4", "--no-progress")
PLUGIN = """
from dataclasses import replace
from pagedctl_kernels.ops.silu_mul.spec import LEAVES
from pagedctl.plugins import Plugin

house = next(leaf for leaf in LEAVES if leaf.capability.kind == "cpu")
plugin = Plugin(leaves=(replace(house, name="acme.silu_mul", priority=house.priority + 100),))
"""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One run of the command in this process."""

    code: int
    out: str
    err: str

    def row(self, case: str) -> str:
        """The table's row of a case."""
        return next(line for line in self.out.splitlines() if line.startswith(f"{case} "))


Invariance = Callable[..., Ran]


@pytest.fixture
def invariance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Invariance]:
    for name in [name for name in os.environ if name.startswith("PAGEDCTL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("PAGEDCTL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    on_term = signal.getsignal(signal.SIGTERM)

    def run(*words: str) -> Ran:
        capfd.readouterr()
        code = main(["invariance", *words])
        out, err = capfd.readouterr()
        return Ran(code=code, out=out, err=err)

    yield run
    signal.signal(signal.SIGTERM, on_term)


@pytest.fixture
def little_power(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of the check of power where it decides nothing."""
    small = {"REQUESTS": 2, "MOST_TOKENS": 3, "FAST_REQUESTS": 1, "FAST_TOKENS": 1}
    for name, size in small.items():
        monkeypatch.setattr(power_check, name, size)


def test_a_sound_engine_gives_a_table_a_manifest_and_a_junit_file(
    invariance: Invariance, tmp_path: Path
) -> None:
    """vllm-project/vllm#28131, #50505, nanomaoli/llm_reproducibility#7, sgl-project/sglang#15041:
    graphs, collectives and other tp are not claimed where there are none."""
    words = ("--cases", "prefix,rescore,graphs,topology", "--junit", "out.xml", "--json", "m.json")
    done = invariance(*SMALL, *words)
    assert done.code == 0
    title, headings, *_ = done.out.splitlines()
    assert title == "invariance · embedded · cpu float32 · invariant · 2 requests x 4 tokens"
    assert headings.split() == [
        *("case", "runs", "requests", "tokens", "resident", "rows", "p50/max", "result")
    ]
    assert done.row("alone").split() == ["alone", "1", "2", "8", "1", "/", "1", "reference"]
    assert "equal (" in done.row("prefix")
    assert "hit tokens)" in done.row("prefix")
    assert done.row("rescore").rstrip().endswith("equal")
    assert "not run: not among --cases" in done.row("packed")
    assert "not run: the CPU has no graphs" in done.row("graphs")
    assert "not run: bits are promised for one tp only" in done.row("topology")
    for point in ("collectives by rows or bytes", "shards of another tp", "graph padding ladder"):
        assert "not applicable" in done.row(point)
    last = done.out.splitlines()[-1]
    assert last.startswith("power: 4 of 4 planted faults caught · fast differs in ")
    assert "equal under invariant in prefix, rescore · cpu float32 tp 1 · " in last
    assert last.endswith(" s")
    assert done.err.splitlines() == ["manifest: m.json"]

    manifest = read_manifest(tmp_path / "m.json").manifest
    assert (manifest.command, manifest.status) == ("invariance", "complete")
    assert manifest.verdict is not None
    assert manifest.verdict.holds is True
    assert manifest.workload is not None
    assert manifest.workload.spec == "invariance:requests=2,max_tokens=4,seed=0"
    assert manifest.config["tp"] == 1
    assert [one.role for one in manifest.files] == ["junit"]
    metrics: Any = manifest.metrics
    assert (metrics["requests_differing"], metrics["planted_faults_caught"]) == (0, 4)
    assert metrics["runs"] == sum(one["runs"] for one in metrics["cases"])
    assert metrics["fast_differs"]["requests"] == 2
    assert len(metrics["cases"]) == 12
    prefix = next(one for one in metrics["cases"] if one["case"] == "prefix")
    assert prefix["counters"]["hit_tokens"] > 0
    assert prefix["resident_rows"] == metrics["cases"][7]["resident_rows"]

    (suite,) = ElementTree.parse(tmp_path / "out.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("13", "0", "0")
    skipped = {one.get("name") for one in suite if one.find("skipped") is not None}
    assert skipped >= {"graphs", "topology", "packed"}


def moved_when_many_rows_are_resident(monkeypatch: pytest.MonkeyPatch, least: int) -> list[int]:
    """Move logprobs by one ulp in calls of *least* rows and more; no token changes."""
    original = TorchLogprob.__call__
    reached = []

    def moved(self: Any, logits: Any, *rest: Any, **named: Any) -> Any:
        found = original(self, logits, *rest, **named)
        if len(logits) >= least:
            reached.append(len(logits))
            found = torch.nextafter(found, torch.full_like(found, -99.0))
        return found

    monkeypatch.setattr(TorchLogprob, "__call__", moved)
    return reached


@pytest.mark.usefixtures("little_power")
def test_one_ulp_from_100_rows_on_is_found_in_the_crowd(
    invariance: Invariance, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = moved_when_many_rows_are_resident(monkeypatch, 100)
    done = invariance(*SMALL, "--cases", "packed", "--no-bisect")
    assert done.code == 1, done.err
    assert max(reached) >= 129
    assert "crowd" in done.out


@pytest.mark.usefixtures("little_power")
def test_one_ulp_from_44_rows_on_is_found_in_a_repeated_batch(
    invariance: Invariance, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vllm-project/vllm#51187, #32480: token ids are the same, logprobs differ once about 44
    rows are resident; the first request and position are told."""
    reached = moved_when_many_rows_are_resident(monkeypatch, 44)
    done = invariance(
        *SMALL, "--cases", "repeat", "--no-bisect", "--junit", "out.xml", "--json", "m.json"
    )
    assert done.code == 1, done.err
    assert max(reached) >= 48
    metrics = json.loads((tmp_path / "m.json").read_bytes())["metrics"]
    first = metrics["first_divergence"]
    assert (first["case"], first["kind"], first["ulps"]) == ("repeat", "logprob", 1)
    told = next(line for line in done.out.splitlines() if line.startswith("first divergence: "))
    assert f"request {first['id']}, sample 0, position {first['position']}, logprob " in told
    assert told.endswith(", 1 ulp")
    assert metrics["suspect"] is None
    assert "NOT BATCH-INVARIANT under invariant: " in done.out.splitlines()[-1]
    (failure,) = ElementTree.parse(tmp_path / "out.xml").getroot().iter("failure")
    assert "position" in str(failure.text)

    repeat = next(line for line in done.out.splitlines() if line.startswith("repeat: "))
    command = shlex.split(repeat.removeprefix("repeat: "))
    assert command[:2] == ["pagedctl", "invariance"]
    again = invariance(*command[2:], "--json", "again.json")
    assert again.code == 1
    repeated = json.loads((tmp_path / "again.json").read_bytes())["metrics"]
    assert repeated["first_divergence"] == first

    clean = invariance(*command[2:], "--max-num-seqs", "8")
    assert clean.code == 2
    assert "no verdict: case repeat: at most 8 rows were resident, fewer than 48" in clean.out


@pytest.mark.usefixtures("little_power")
def test_one_row_at_a_time_forms_no_batches(invariance: Invariance) -> None:
    """vllm-project/vllm-omni#5512: max_num_seqs 1 must not pass."""
    done = invariance(*SMALL, "--max-num-seqs", "1", "--cases", "packed,repeat,sampled")
    assert done.code == 2
    for case in ("packed", "repeat", "sampled"):
        told = f"no verdict: case {case}: no batches formed; give --max-num-seqs 65 or more"
        assert told in done.out
    assert "NOT CAUGHT" in done.row("planted fault sample-keyed-by-row")
    assert "NO VERDICT under invariant" in done.out.splitlines()[-1]


@pytest.mark.usefixtures("little_power")
def test_a_pool_for_few_rows_gives_no_verdict(invariance: Invariance) -> None:
    words = ("--kv-cache-memory-bytes", "1MiB", "--max-model-len", "128", "--cases", "repeat")
    done = invariance(*SMALL, *words)
    assert done.code == 2
    told = next(line for line in done.out.splitlines() if line.startswith("no verdict: "))
    assert "rows were resident, fewer than 48; give a larger --kv-cache-memory-bytes" in told


@pytest.mark.usefixtures("little_power")
def test_the_reference_alone_proves_nothing(invariance: Invariance, tmp_path: Path) -> None:
    done = invariance(*SMALL, "--cases", "alone,graphs", "--junit", "out.xml")
    assert done.code == 2
    told = "nothing was compared: no chosen case applies here"
    assert f"no verdict: {told}" in done.out
    (error,) = ElementTree.parse(tmp_path / "out.xml").getroot().iter("error")
    assert told in str(error.text)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--max-num-seqs", "64"), "max_num_seqs 64 leaves out batches of 129 rows"),
        (("--debug-force-preemption-interval", "9"), "preemptions are forced in every run"),
        ((), "no sequence has more than 65 tokens, and attention splits its keys by 256"),
    ],
)
def test_a_run_that_options_narrow_earns_no_record(
    invariance: Invariance, tmp_path: Path, words: tuple[str, ...], why: str
) -> None:
    """The record would grant what was not looked at: none of these options is a key of it."""
    done = invariance(*SMALL, "--record", *words)
    assert (done.code, done.out) == (2, "")
    assert f"error: this run earns no record: {why}" in done.err.splitlines()
    assert not (tmp_path / "home" / "records").exists()


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (("--numerics", "fast"), "error: there is nothing to check: fast promises no bits"),
        (("--no-batch-invariant",), "error: batch_invariant off is looser than the contract"),
        (
            ("--numerics", "rl-bitwise", "--logprob-order", "torch"),
            "error: logprob_order torch is looser than the contract",
        ),
        (("--cases", "packd"), "error: cases packd is unknown"),
        (
            ("--max-model-len", "5", "--max-tokens", "4"),
            "error: max_tokens 4 leaves no room for a prompt",
        ),
        (("--topology-invariant",), "error: topology_invariant True is not available"),
    ],
)
def test_what_cannot_be_proved_is_refused(
    invariance: Invariance, words: tuple[str, ...], first: str
) -> None:
    """InternLM/xtuner#1644: a flag that breaks the contract is refused, not kept."""
    done = invariance(*words)
    assert (done.code, done.out) == (2, "")
    assert any(line.startswith(first) for line in done.err.splitlines()), done.err


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (("--record", "--cases", "packed"), "error: --record does not go with --cases"),
        (("--record", "--processes", "1"), "error: --record does not go with --processes 1"),
        (("--record", "--no-prefix-cache"), "error: --record does not go with --no-prefix-cache"),
        (("--record", "-"), "error: --record cannot go to stdout"),
        (("--junit", "-"), "error: --junit cannot go to stdout"),
        (("--prompts", "-"), "error: --prompts cannot come from stdin"),
        (("--junit", "old.xml"), "error: old.xml exists"),
        (("--record", "old.xml"), "error: old.xml exists"),
        (("--junit", "a", "--json", "./a"), "error: a would be written twice"),
        (("--junit", "none/a.xml"), "error: folder none does not"),
    ],
)
def test_files_that_could_not_be_written_are_refused_before_anything_runs(
    invariance: Invariance, tmp_path: Path, words: tuple[str, ...], first: str
) -> None:
    (tmp_path / "old.xml").write_text("kept")
    done = invariance(*words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(first), done.err
    assert (tmp_path / "old.xml").read_text() == "kept"
    assert not (tmp_path / "pagedctl-runs").exists()


@pytest.mark.usefixtures("little_power")
def test_prompts_of_a_file_keep_their_ids(invariance: Invariance, tmp_path: Path) -> None:
    lines = (
        '{"id": "a", "prompt": "Tom has 3 apples and buys 4. How many?", "temperature": 0.3}',
        '{"id": "b", "prompt_token_ids": [5, 6, 7]}',
        '{"id": "c", "prompt_token_ids": [8, 9]}',
    )
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    words = ("--prompts", "prompts.jsonl", "--cases", "rescore", "--json", "m.json")
    done = invariance(*SMALL, *words)
    assert done.err.splitlines() == [
        "warning: the first 2 of 3 prompts are used: --requests 2 (option prompts prompts.jsonl)",
        "warning: sampling fields of 1 line have no effect: the proof sets them (option prompts "
        "prompts.jsonl)",
        "manifest: m.json",
    ]
    manifest = json.loads((tmp_path / "m.json").read_bytes())
    assert manifest["workload"]["spec"] == "prompts.jsonl"
    assert [one["role"] for one in manifest["files"]] == ["input"]
    rescore = next(one for one in manifest["metrics"]["cases"] if one["case"] == "rescore")
    assert (rescore["holds"], rescore["requests"]) == (True, 2)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("", "error: prompts.jsonl has no requests"),
        ('{"prompt_token_ids": [999999]}\n', "error: prompt_token_ids[0] is 999999"),
        ('{"prompt_token_ids": [5], "answer": 7}\n', "remedy: remove it"),
        (None, "rule: the input is a readable file"),
        (json.dumps({"prompt_token_ids": [5] * 2045}), "error: the prompt has 2045 tokens"),
    ],
)
def test_prompts_that_cannot_be_served_are_refused(
    invariance: Invariance, tmp_path: Path, text: str | None, first: str
) -> None:
    if text is not None:
        (tmp_path / "prompts.jsonl").write_text(text)
    done = invariance(*SMALL, "--prompts", "prompts.jsonl")
    assert (done.code, done.out) == (2, "")
    assert any(line.startswith(first) for line in done.err.splitlines()), done.err


def test_explain_numerics_runs_nothing(invariance: Invariance, tmp_path: Path) -> None:
    done = invariance("--explain-numerics", "--numerics", "rl-bitwise")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("numerics · rl-bitwise · embedded · cpu float32")
    assert not (tmp_path / "pagedctl-runs").exists()


def test_a_record_of_a_real_run_grants_the_contract(cli: Cli, tmp_path: Path) -> None:
    """A leaf from outside is in no shipped profile; the command earns its record."""
    site = tmp_path / "site"
    info = site / "acme-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pagedctl.plugins]\nacme = acme_leaf:plugin\n")
    (site / "acme_leaf.py").write_text(PLUGIN)
    environ = {"PYTHONPATH": python_path(site)}
    config = tiny_model("llama", max_position_embeddings=256).write_config(tmp_path / "tiny")
    model = ("--model", config, "--random-weights", "3", "--kv-cache-memory-bytes", "8MiB")
    contract = ("--numerics", "invariant")
    (tmp_path / "in.jsonl").write_text('{"prompt_token_ids": [5, 6], "max_tokens": 2}\n')
    sample = ("generate", *model, *contract, "-i", "in.jsonl")

    refused = cli(*sample, "-o", "refused.jsonl", env=environ)
    assert refused.returncode == 2
    assert "pagedctl invariance" in refused.stderr

    proof = cli(
        "invariance", *model, *contract, *SMALL, "--record", "--json", "p.json", env=environ
    )
    assert proof.returncode == 0, proof.stdout
    assert "BATCH-INVARIANT under invariant · cpu float32 tp 1" in proof.stdout.splitlines()[-1]
    named, last = proof.stderr.splitlines()[-2:]
    assert last == "manifest: p.json"
    path = Path(named.removeprefix("record: "))
    assert path.parent == tmp_path / "home" / "records"
    record = read_record(path)
    ran = ("packed", "repeat", "process", "chunks", "pools", "preemption", "prefix", "rescore")
    assert record.cases == (*ran, "sampled")
    assert (record.command, record.contract, record.graphs) == ("invariance", "invariant", False)
    assert record.manifest.path == "p.json"
    manifest = read_manifest(tmp_path / "p.json").manifest
    assert manifest.metrics["requests_differing"] == 0
    assert manifest.config["record"] == str(path.parent)

    granted = cli(*sample, "-o", "granted.jsonl", env=environ)
    assert granted.returncode == 0, granted.stderr
    written = json.loads((tmp_path / "granted.jsonl.manifest.json").read_bytes())
    assert written["numerics"]["eligible_by"] == str(path)
