"""``--explain-numerics``: the tree, the leaves and who vouches, without input or weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from pagedctl.cli.main import BODIES
from pagedctl.config.surface import COMMANDS
from pagedctl.models.locate import locate_model
from pagedctl.numerics.switches import FIXED, SWITCHES, Branch
from tests.cli.every_command import Folder, folder_of_commands
from tests.conftest import ROOT, python_path

WITH_CONTRACT = [name for name in BODIES if "contract" in COMMANDS[name].groups]
SHOWN = "--explain-numerics"
WORK = ("--workload", "decode:requests=2,prompt=4,output=2", "--warmup", "0", "--repeats", "1")
NARROWED = ("--leaf", "gemm=torch.gemm_row_blocks", "--leaf", "head=torch.head_row_blocks")
CONTRACTS = (
    (),
    ("--numerics", "fast"),
    ("--numerics", "rl-bitwise", "--dtype", "bfloat16", "--unverified"),
    ("--norm-cast", "after", "--padded-vocab-size", "1024", "--logprob-order", "blockwise-256"),
    NARROWED,
)
LIMIT_BYTES = 3 << 30
"""A fifth of qwen3-8b's weights; the checks of its whole head alone would take 12 GiB."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with folder_of_commands(tmp_path, monkeypatch, {}) as found:
        yield found


@pytest.fixture
def shown(folder: Folder, capfd: pytest.CaptureFixture[str]) -> Any:
    """Run words with --explain-numerics: the exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = folder.run(*words, SHOWN)
        out, err = capfd.readouterr()
        return code, out, err

    return run


def rows(out: str) -> list[list[str]]:
    """The lines of a display in a pipe, each cut where two spaces or more part its cells."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in out.split("\n")]


@pytest.mark.parametrize("command", WITH_CONTRACT)
def test_every_command_with_a_contract_explains_it_on_stdout_alone(
    shown: Any, folder: Folder, command: str
) -> None:
    before = set(folder.path.iterdir())
    code, out, err = shown(command)
    assert (code, err) == (0, "")
    found = rows(out)
    for branch in get_args(Branch):
        assert [branch] in found
    named = {row[0]: row for row in found if row}
    for one in SWITCHES:
        assert named[one.name][3] == one.changes
    assert all(named[name][2] == "always" for name in FIXED)
    assert named["batch_invariant"][1:3] == ["on", "contract"]
    assert named["logprob_basis"][1:3] == ["scaled", "default"]
    assert set(folder.path.iterdir()) == before


@pytest.mark.parametrize("words", CONTRACTS, ids=["default", "fast", "rl", "orders", "leaves"])
def test_the_object_is_the_one_in_the_manifest_of_a_run(
    shown: Any, folder: Folder, words: tuple[str, ...]
) -> None:
    assert folder.run("bench", *WORK, *words, "--quiet", "--json", "run.json") == 0
    of_run = json.loads((folder.path / "run.json").read_bytes())["numerics"]
    assert of_run["leaves"]
    assert of_run["arithmetic_id"]
    code, out, _ = shown("bench", *words, "--json")
    assert code == 0
    assert json.loads(out) == of_run
    if words == NARROWED:
        assert {"torch.gemm_row_blocks", "torch.head_row_blocks"} <= {*of_run["leaves"].values()}


def test_a_model_without_weights_gives_what_the_whole_snapshot_gives(
    shown: Any, tmp_path: Path
) -> None:
    whole = locate_model("embedded").folder
    assert whole is not None
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(whole / "config.json", bare)
    for command in ("score", "generate"):
        code, out, err = shown(command, "--model", str(bare), "--json")
        assert (code, err) == (0, "")
        assert json.loads(out) == json.loads(shown(command, "--json")[1])


def test_an_architecture_of_eight_billion_parameters_takes_little_memory(
    tmp_path: Path, clean_environ: dict[str, str]
) -> None:
    program = (
        "import resource, sys\nfrom pagedctl.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, file=sys.stderr)\n"
        "sys.exit(code)"
    )
    words = ("generate", "--model", "qwen3-8b", SHOWN)
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=tmp_path,
        env={**clean_environ, "PYTHONPATH": python_path(ROOT, ROOT / "kernels")},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    *notes, peak = done.stderr.splitlines()
    assert int(peak) < LIMIT_BYTES
    head = next(row for row in rows(done.stdout) if row[:1] == ["head lm_head 4096x151936"])
    assert head[2] == "checked on 8,192 of 151,936 columns"
    assert any("a run checks all of them" in note for note in notes)


@pytest.mark.parametrize("command", WITH_CONTRACT)
def test_a_refused_value_stands_in_the_tree_and_the_error_follows(
    shown: Any, folder: Folder, command: str
) -> None:
    """InternLM/xtuner#1644: a flag that breaks the contract is refused, not kept."""
    target = folder.path / "numerics.json"
    code, out, err = shown(command, "--no-batch-invariant", "--json", str(target))
    assert code == 2
    assert err.startswith("error: batch_invariant off is looser than the contract invariant\n")
    found = rows(out)
    place = found.index(next(row for row in found if row[:1] == ["batch_invariant"]))
    assert found[place][1:3] == ["on", "contract"]
    assert found[place + 1][:3] == ["refused", "off", "flag"]
    assert sum(row[:1] == ["refused"] for row in found) == 1
    assert not target.exists()
    assert shown(command, "--no-batch-invariant", "--json")[:2] == (2, "")


def test_the_same_value_is_kept_where_nothing_is_promised(shown: Any) -> None:
    code, out, err = shown("bench", "--no-batch-invariant", "--numerics", "fast")
    assert (code, err) == (0, "")
    found = rows(out)
    assert next(row for row in found if row[:1] == ["batch_invariant"])[1:3] == ["off", "flag"]
    assert not any(row[:1] == ["refused"] for row in found)


def test_who_set_a_switch_is_said(shown: Any, folder: Folder) -> None:
    plan = folder.path / "numbers.toml"
    plan.write_text(
        'schema = "pagedctl.plan/1"\nname = "p"\n'
        'numerics = { norm_cast = "after", layer_boundary_norm = "fused" }\n'
    )
    code, out, _ = shown("score", "--plan", str(plan), "--head-dtype", "float32")
    assert code == 2
    found = {row[0]: row for row in rows(out) if row}
    assert found["norm_cast"][1:3] == ["after", f"plan {plan}"]
    assert found["refused"][1:3] == ["fused", f"plan {plan}"]
    assert found["head_dtype"][1:3] == ["float32", "flag"]


def test_where_no_leaf_qualifies_every_candidate_is_named(shown: Any) -> None:
    code, out, err = shown("bench", "--leaf", "gemm=torch.gemm_library")
    assert code == 2
    assert any(row[:1] == ["batch_invariant"] for row in rows(out))
    for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
        assert f"error: no leaf of op gemm qualifies at {name} on cpu" in err
    assert "  torch.gemm_library (priority 20): refused: does not declare batch_invariant" in err
    assert "torch.gemm_per_row" in err
    assert "Traceback" not in err


def test_candidates_are_chosen_eligible_or_refused_with_the_reason(shown: Any) -> None:
    found = rows(shown("bench")[1])
    place = next(place for place, row in enumerate(found) if row[:1] == ["candidates at"])
    gemm = found[place + 1 : place + 6]
    sites, *first = gemm[0]
    assert sites == "gemm qkv_proj, o_proj, gate_up_proj, down_proj"
    assert first[1] == "chosen"
    standings = {first[0]: first[1], **dict(gemm[1:])}
    assert standings["torch.gemm_per_row"] == "eligible"
    assert standings["torch.gemm_library"] == "refused: does not declare batch_invariant"
    assert standings["torch.gemm_packed_bfloat16"].startswith("refused: no format takes x:float32")
    assert [*standings.values()].count("chosen") == 1


def test_who_vouches_or_what_is_missing_and_how_to_earn_it_is_told(shown: Any) -> None:
    found = rows(shown("generate")[1])
    assert ["verified", "yes"] in found
    assert ["eligible by", "profile qwen3 float32 cpu"] in found
    assert not any(row[:1] == ["missing"] for row in found)
    code, out, _ = shown("generate", "--numerics", "rl-bitwise")
    assert code == 0
    found = rows(out)
    assert ["verified", "no"] in found
    missing = " ".join(row[1] for row in found if row[:1] == ["missing"])
    assert "a record of invariance" in missing
    assert "a record of align" in missing
    earn = next(row[1] for row in found if row[:1] == ["to earn it"])
    assert "pagedctl invariance --numerics rl-bitwise" in earn
    assert any(row[:1] == ["until then"] for row in found)
    found = rows(shown("generate", "--numerics", "fast")[1])
    assert ["verified", "yes"] in found
    assert not any(row[:1] == ["eligible by"] for row in found)


def test_a_file_is_written_once_and_the_display_stays(shown: Any, folder: Folder) -> None:
    path = folder.path / "numerics.json"
    code, out, _ = shown("bench", "--json", str(path))
    assert (code, out.split(" · ")[0]) == (0, "numerics")
    written = path.read_bytes()
    assert json.loads(written) == json.loads(shown("bench", "--json")[1])
    code, out, err = shown("bench", "--json", str(path))
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {path} exists\n")
    assert path.read_bytes() == written


def test_quiet_drops_the_display_and_keeps_the_object(shown: Any) -> None:
    assert shown("bench", "--quiet") == (0, "", "")
    assert json.loads(shown("bench", "--quiet", "--json")[1])["contract"] == "invariant"


def test_an_inherited_variable_that_voids_a_switch_is_refused_as_a_run_would_be(
    shown: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    code, out, err = shown("bench")
    assert code == 2
    assert any(row[:1] == ["deterministic_kernels"] for row in rows(out))
    assert err.startswith("error: the environment variable ONEDNN_DEFAULT_FPMATH_MODE is BF16\n")
    assert shown("bench", "--numerics", "fast")[0] == 0
