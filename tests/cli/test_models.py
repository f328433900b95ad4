"""``pagedctl models``: what can be named here, and one model in full, without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from pagedctl.cli.model_tables import inspection_tables, list_table
from pagedctl.models.builtin import BUILTIN
from pagedctl.models.inspection import inspect_model, list_models
from pagedctl.models.locate import embedded_location
from tests.conftest import ROOT, Cli

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def copy_embedded(folder: Path) -> Path:
    source = embedded_location().path
    assert source is not None
    shutil.copytree(source, folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> dict[str, str]:
    """An environment whose Hugging Face cache has one good and one foreign snapshot."""
    hub = tmp_path / "hf" / "hub"
    copy_embedded(hub / "models--org--Tiny" / "snapshots" / COMMIT)
    foreign = hub / "models--org--Foreign" / "snapshots" / COMMIT
    foreign.mkdir(parents=True)
    (foreign / "config.json").write_text('{"model_type": "gpt2"}')
    return {"HF_HOME": str(tmp_path / "hf")}


def row(table: str, name: str) -> list[str]:
    """The cells of the row that starts with *name*; they are two or more spaces apart."""
    lines = [line.split() for line in table.splitlines()]
    (found,) = [cells for cells in lines if cells[:1] == [name]]
    return found


# -- list ----------------------------------------------------------------------------------


def test_the_list_has_what_can_be_named_here(cli: Cli, cache: dict[str, str]) -> None:
    done = cli("models", "list", env=cache)
    assert done.returncode == 0
    assert row(done.stdout, "embedded")[:4] == ["embedded", "embedded", "1,025,856", "float32"]
    assert row(done.stdout, "qwen3-8b")[:4] == [
        "qwen3-8b",
        "builtin",
        "8,190,735,360",
        "bfloat16",
    ]
    assert row(done.stdout, "tiny") == [
        "tiny",
        "cache",
        "1,025,856",
        "float32",
        f"org/Tiny@{COMMIT}",
    ]
    assert all(row(done.stdout, name)[1] == "builtin" for name in BUILTIN)


def test_a_snapshot_that_cannot_be_served_is_listed_and_says_why(
    cli: Cli, cache: dict[str, str]
) -> None:
    done = cli("models", "list", "--json", env=cache)
    assert done.returncode == 0
    assert "org/Foreign@" in done.stderr
    assert 'model_type "gpt2" is not supported' in done.stderr
    manifest = json.loads(done.stdout)
    found = {one["name"]: one for one in manifest["metrics"]["models"]}
    assert found["foreign"]["parameters"] is None
    assert found["foreign"]["faults"][0]["what"].startswith('model_type "gpt2"')
    assert found["tiny"]["faults"] == []
    assert [one["code"] for one in manifest["warnings"]] == ["not_served"]


# -- inspect -------------------------------------------------------------------------------


def test_inspect_shows_the_embedded_model_in_full(cli: Cli) -> None:
    done = cli("models", "inspect", "embedded")
    assert done.returncode == 0
    assert done.stderr == ""
    for piece in (
        "sha256:",
        "float32 (config.json)",
        "4,103,424 bytes in 1 file",
        "default, theta 10,000",
        "none: every layer sees all keys",
        "tokenizer.json, tokenizer_config.json, chat_template.jinja",
        "config.json, generation_config.json, tokenizer_config.json",
        "profile qwen3 float32 cpu",
        "leaves and switches are checked when an engine starts",
        "unverified: no profile covers qwen3 float32, and there is no record of invariance or of "
        "align",
    ):
        assert piece in done.stdout
    assert row(done.stdout, "mlp.down_proj")[1:] == [
        "6", "128", "x", "288", "float32", "884,736",
    ]  # fmt: skip
    assert row(done.stdout, "all") == ["all", "68", "4,103,424"]


def test_the_metrics_are_those_of_the_surface(cli: Cli) -> None:
    done = cli("models", "inspect", "llama-3.1-8b", "--json")
    assert done.returncode == 0
    manifest = json.loads(done.stdout)
    metrics = manifest["metrics"]
    assert metrics["head_dim"] == 128
    assert metrics["num_key_value_heads"] == 8
    assert metrics["rope"] == {"type": "llama3", "theta": 500000.0, "factor": 8.0}
    assert metrics["windows"] == [None] * 32
    assert metrics["tensors"] == 291
    assert metrics["parameters"] == manifest["model"]["parameters"] == 8_030_261_248
    assert metrics["weight_bytes"] == 2 * 8_030_261_248
    assert metrics["eos_token_ids"]["128009"] == ["config.json"]
    assert metrics["eligible"]["fast"]["verified"] is True
    assert metrics["eligible"]["invariant"]["verified"] is True
    assert metrics["eligible"]["invariant"]["eligible_by"] == "profile llama bfloat16 cpu"
    assert metrics["eligible"]["rl-bitwise"]["verified"] is False
    assert metrics["eligible"]["rl-bitwise"]["eligible_by"] is None
    assert manifest["command"] == "models inspect"
    assert manifest["config"] == {"tp": 1}
    assert manifest["config_origin"] == {"tp": "default"}


def test_windows_are_given_by_layer(cli: Cli) -> None:
    done = cli("models", "inspect", "mistral-7b-v0.1", "--json")
    assert json.loads(done.stdout)["metrics"]["windows"] == [4096] * 32
    assert "layers 0 to 31: 4,096 keys" in cli("models", "inspect", "mistral-7b-v0.1").stdout


def test_bytes_are_those_of_one_rank(cli: Cli) -> None:
    done = cli("models", "inspect", "qwen3-8b", "--tp", "4")
    assert row(done.stdout, "all") == ["all", "399", "4,095,830,016"]
    assert "36,864 bytes on each of 4 ranks" in done.stdout
    manifest = json.loads(cli("models", "inspect", "qwen3-8b", "--tp", "4", "--json").stdout)
    assert manifest["metrics"]["weight_bytes"] == 4_095_830_016
    assert manifest["config_origin"] == {"tp": "flag"}


def test_a_snapshot_and_its_copy_have_one_digest_and_hashes_are_kept(
    cli: Cli, cache: dict[str, str], tmp_path: Path
) -> None:
    def digest(model: str) -> str:
        done = cli("models", "inspect", model, "--json", env=cache)
        return str(json.loads(done.stdout)["model"]["digest"])

    assert digest("embedded") == digest(f"org/Tiny@{COMMIT}")
    assert (tmp_path / "home" / "digests").is_dir()


def test_a_warning_is_said_and_recorded(cli: Cli, tmp_path: Path) -> None:
    folder = copy_embedded(tmp_path / "cast")
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    done = cli("models", "inspect", str(folder), "--quiet", "--json", "m.json")
    assert done.returncode == 0
    assert done.stdout == ""
    assert "68 tensors stored as float32 are cast to bfloat16" in done.stderr
    manifest = json.loads((tmp_path / "m.json").read_bytes())
    assert [one["code"] for one in manifest["warnings"]] == ["cast"]


# -- refusals ------------------------------------------------------------------------------


def test_every_reason_is_given_and_the_exit_code_is_2(cli: Cli, tmp_path: Path) -> None:
    folder = copy_embedded(tmp_path / "broken")
    config = json.loads((folder / "config.json").read_bytes())
    broken = {**config, "hidden_act": "gelu", "rms_norm_eps": -1}
    (folder / "config.json").write_text(json.dumps(broken))
    (folder / "model.safetensors").write_bytes(b"abc")
    done = cli("models", "inspect", str(folder), "--json")
    assert done.returncode == 2
    whats = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(whats) == 3
    manifest = json.loads(done.stdout)
    assert manifest["status"] == "failed"
    assert [f"error: {one['what']}" for one in manifest["error"]["faults"]] == whats


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("qwen3-8c",), "nearest built-in name: qwen3-8b"),
        (("qwen3-8b", "--tp", "7"), "cannot be split over 7 ranks"),
        (("qwen3-8b", "--tp", "0"), "--tp"),
        (("org/absent",), "is not in the local cache"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused(
    words: tuple[str, ...], says: str, cli: Cli
) -> None:
    done = cli("models", "inspect", *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert says in done.stderr
    assert "remedy: " in done.stderr


def test_a_manifest_is_written_only_where_it_is_told_to(cli: Cli, tmp_path: Path) -> None:
    assert cli("models", "inspect", "qwen3-8b").returncode == 0
    assert not (tmp_path / "pagedctl-runs").exists()
    assert cli("models", "inspect", "qwen3-8b", "--json", "m.json").returncode == 0
    assert json.loads((tmp_path / "m.json").read_bytes())["model"]["name"] == "qwen3-8b"


# -- the frame -----------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["list"], ["inspect", "embedded"], ["inspect", "qwen3-8b"]])
def test_nothing_heavy_is_imported(words: list[str], clean_environ: dict[str, str]) -> None:
    code = (
        "import sys; from pagedctl.cli.main import main; "
        f"code = main({['models', *words]!r}); "
        "heavy = ('torch', 'triton', 'transformers', 'tokenizers', 'safetensors', 'numpy'); "
        "sys.exit(code or ' '.join(name for name in heavy if name in sys.modules) or None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=clean_environ,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_no_number_is_wrapped_on_a_narrow_terminal() -> None:
    stream = StringIO()
    console = Console(file=stream, width=80)
    console.print(list_table(list_models({"HF_HOME": "/nonexistent"})))
    inspection = inspect_model("llama-3.1-70b", tp=2, environ={})
    console.print(*inspection_tables(inspection, "sha256:0", {}))
    text = stream.getvalue()
    total = f"{inspection.spec.weight_bytes(tp=2):,}"
    for number in ("70,553,706,496", total, "64128 x 8192"):
        assert number in text
