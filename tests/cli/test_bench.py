"""``pagedctl bench`` as a person runs it, on the embedded model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pagedctl.manifest.reader import read_manifest
from tests.conftest import Cli

SMALL = ("--workload", "decode:requests=3,prompt=5,output=4", "--warmup", "0", "--repeats", "2")


def only_manifest(folder: Path) -> Path:
    (path,) = (folder / "pagedctl-runs").glob("*-bench-*.json")
    return path


def test_a_bench_shows_a_table_and_leaves_a_manifest(cli: Cli, tmp_path: Path) -> None:
    done = cli("bench", *SMALL, "--numerics", "fast", "--max-num-seqs", "2")
    assert done.returncode == 0, done.stderr
    title, *table = done.stdout.splitlines()
    assert title == (
        "bench · embedded · cpu float32 · fast · decode:requests=3,prompt=5,output=4,seed=0"
        " · 2 repeats"
    )
    for words in ("output tokens/s", "TTFT ms", "running p50/max", "forward tokens"):
        assert any(words in line for line in table)
    path = only_manifest(tmp_path)
    assert done.stderr.splitlines()[-1] == f"manifest: {path.relative_to(tmp_path)}"
    manifest = read_manifest(path).manifest
    assert (manifest.command, manifest.status, manifest.verdict) == ("bench", "complete", None)
    assert manifest.model is not None
    assert (manifest.model.name, manifest.model.dtype) == ("embedded", "float32")
    assert manifest.model.digest is not None
    assert manifest.model.digest.startswith("sha256:")
    assert manifest.numerics is not None
    assert (manifest.numerics.contract, manifest.numerics.verified) == ("fast", True)
    assert "attention" in manifest.numerics.leaves
    assert manifest.workload is not None
    assert manifest.workload.spec == "decode:requests=3,prompt=5,output=4,seed=0"
    assert {one.term for one in manifest.memory} >= {"weights", "kv"}
    assert [one.rank for one in manifest.devices] == [0]
    assert "torch" in manifest.versions
    assert manifest.config["max_num_seqs"] == 2
    assert manifest.config["temperature"] == 1.0
    assert "json" not in manifest.config
    assert manifest.config_origin["max_num_seqs"] == "flag"
    assert manifest.config_origin["max_model_len"] == "derived: model positions"
    assert set(manifest.config) == set(manifest.config_origin)


def test_the_metrics_count_the_work(cli: Cli, tmp_path: Path) -> None:
    done = cli("bench", *SMALL, "--json", "--max-num-seqs", "2", "--top-k", "5", "-n", "2")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed == json.loads(only_manifest(tmp_path).read_bytes())
    metrics, samples = printed["metrics"], printed["samples"]
    assert (metrics["requests_completed"], metrics["requests_failed"]) == (3, 0)
    assert (metrics["prompt_tokens"], metrics["output_tokens"]) == (15, 24)
    assert metrics["finish_reasons"] == {"stop": 0, "length": 6, "abort": 0}
    assert (metrics["len_p50"], metrics["len_max"]) == (4, 4)
    assert metrics["forward_tokens"] == 6 * (5 + 3)
    assert metrics["peak_device_mib"] is None
    assert metrics["output_tokens_per_s"] == pytest.approx(
        sum(24 / wall_s for wall_s in samples["wall_s"]) / 2
    )
    assert len(samples["wall_s"]) == len(samples["e2e_ms"]) == 2
    for first, last, between in zip(
        samples["ttft_ms"][0], samples["e2e_ms"][0], samples["tpot_ms"][0], strict=True
    ):
        assert 0 < first < last
        assert between == pytest.approx((last - first) / 3, abs=1e-5)


def test_a_fixed_workload_says_how_it_departs(cli: Cli, tmp_path: Path) -> None:
    words = (
        "--workload",
        "decode1",
        "--max-model-len",
        "132",
        "--temperature",
        "0.5",
        "--unverified",
    )
    done = cli("bench", *words, "--warmup", "0", "--repeats", "1", "--quiet", "--json", "m.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "warning: token ids are taken modulo 512, the model's vocabulary (workload decode1)",
        "warning: 1 outputs are cut to end at max_model_len 132 (workload decode1)",
        "warning: temperature has no effect: the workload sets it (workload decode1)",
    ]
    manifest = json.loads((tmp_path / "m.json").read_bytes())
    assert manifest["workload"]["spec"] == "decode1"
    assert manifest["metrics"]["output_tokens"] == 4
    assert [one["code"] for one in manifest["warnings"]] == [
        "different_work",
        "different_work",
        "option_ignored",
    ]


def test_a_file_says_for_itself(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "work.jsonl").write_text(
        '{"prompt": "Tom has 3 apples and buys 4.", "max_tokens": 3, "ignore_eos": true}\n'
        '{"id": "peer", "prompt_ids": [5, 6, 7], "max_tokens": 2, "ignore_eos": true}\n'
    )
    words = ("--workload", "work.jsonl", "--warmup", "0", "--repeats", "1", "--json", "m.json")
    done = cli("bench", *words)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "m.json").read_bytes())
    assert manifest["workload"]["seed"] is None
    assert [(one["role"], one["path"]) for one in manifest["files"]] == [("input", "work.jsonl")]
    metrics = manifest["metrics"]
    assert metrics["output_tokens"] == 5
    assert metrics["tokens_per_s_end_to_end"] < metrics["output_tokens_per_s"]


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["--workload", "unifrm"], "error: unifrm is neither a workload nor a file"),
        (
            ["--workload", "bad.jsonl"],
            "error: prompt_token_ids[0] is 999999, outside the input vocabulary",
        ),
        (["--model", "embeded"], 'error: model "embeded" was not found'),
        (["--device", "cuda"], "error: device cuda is not available in this version"),
    ],
)
def test_a_refusal_leaves_a_failed_manifest(
    cli: Cli, tmp_path: Path, words: list[str], first: str
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt_token_ids": [999999]}\n')
    done = cli("bench", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert any(line.startswith(first) for line in done.stderr.splitlines()), done.stderr
    manifest = json.loads(only_manifest(tmp_path).read_bytes())
    assert manifest["status"] == "failed"
    assert f"error: {manifest['error']['what']}" in done.stderr


def test_a_reserved_option_is_refused(cli: Cli, tmp_path: Path) -> None:
    done = cli("bench", "--suite", "h200")
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: --suite is not available in this version" in done.stderr
    assert not (tmp_path / "pagedctl-runs").exists()


STOPPED = """
import sys
from pagedctl.cli.main import main
from pagedctl.cli.progress import Progress

def update(self, done, total, text):
    if text == "repeat 2 of 2":
        raise KeyboardInterrupt

Progress.update = update
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_keeps_the_finished_repeats(tmp_path: Path, clean_environ: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, "bench", *SMALL, "--unverified", "--json", "m.json"],
        cwd=tmp_path,
        env=clean_environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\nmanifest: m.json\n")
    manifest = json.loads((tmp_path / "m.json").read_bytes())
    assert manifest["status"] == "interrupted"
    assert manifest["metrics"]["output_tokens"] == 12
    assert len(manifest["samples"]["wall_s"]) == 1
