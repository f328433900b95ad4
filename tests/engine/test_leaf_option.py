"""``--leaf OP=NAME`` narrows an op's candidates and bypasses nothing of the contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Request, SamplingParams
from pagedctl.errors import ConfigError, NumericsRefused, PagedctlError
from pagedctl.manifest.reader import read_manifest
from tests.cli.every_command import Folder, folder_of_commands
from tests.engine.harness import tiny_engine
from tests.reference.tiny_models import tiny_model

ROW_BLOCKS = "gemm=torch.gemm_row_blocks"
PER_ROW = "gemm=torch.gemm_per_row"
LIBRARY = "gemm=torch.gemm_library"
MODEL = tiny_model("qwen3")


def engine(folder: Path, *leaves: str, **options: Any) -> Engine:
    return tiny_engine(MODEL, folder, dtype=torch.float32, leaf=leaves, **options)


def gemm_leaves(found: Engine) -> set[str]:
    numerics = found.manifest().numerics
    assert numerics is not None
    return {leaf for site, leaf in numerics.leaves.items() if site.startswith("gemm ")}


def test_a_named_leaf_serves_its_op_everywhere_and_stands_in_the_manifest(tmp_path: Path) -> None:
    with engine(tmp_path) as plain, engine(tmp_path, PER_ROW) as narrowed:
        assert "torch.gemm_per_row" not in gemm_leaves(plain)
        assert gemm_leaves(narrowed) == {"torch.gemm_per_row"}
        others = [
            {site: leaf for site, leaf in one.parts.plans.leaves().items() if "gemm" not in site}
            for one in (plain, narrowed)
        ]
        assert others[0] == others[1]


def test_engines_with_other_leaves_have_other_arithmetic(tmp_path: Path) -> None:
    with engine(tmp_path, ROW_BLOCKS) as blocks, engine(tmp_path, PER_ROW) as rows:
        ids = {one.parts.plans.arithmetic_id for one in (blocks, rows)}
    with engine(tmp_path, ROW_BLOCKS) as again:
        assert again.parts.plans.arithmetic_id in ids
    assert len(ids) == 2


def test_several_values_of_one_op_allow_several_leaves(tmp_path: Path) -> None:
    with engine(tmp_path, PER_ROW, ROW_BLOCKS) as both:
        assert gemm_leaves(both) == {"torch.gemm_row_blocks"}
    with engine(tmp_path, PER_ROW, LIBRARY) as one_is_tight_enough:
        assert gemm_leaves(one_is_tight_enough) == {"torch.gemm_per_row"}
    with engine(tmp_path, PER_ROW, LIBRARY, numerics="fast") as fast:
        assert gemm_leaves(fast) == {"torch.gemm_library"}


@pytest.mark.parametrize("contract", ["invariant", "rl-bitwise"])
def test_the_contract_s_requirement_stays(tmp_path: Path, contract: str) -> None:
    with pytest.raises(NumericsRefused) as caught:
        engine(tmp_path, LIBRARY, numerics=contract, unverified=True)
    assert len(caught.value.faults) == 4
    for fault in caught.value.faults:
        assert "torch.gemm_library (priority 20): refused: does not declare batch_invariant" in (
            fault.what
        )
        assert fault.rule == f"the contract {contract} needs a leaf at every call site"
        assert "drop --leaf gemm" in fault.remedy


def test_under_fast_the_same_leaf_runs(tmp_path: Path) -> None:
    request = Request(
        id=0, prompt_token_ids=(5, 6, 7), params=SamplingParams(max_tokens=6, temperature=0.0)
    )
    with engine(tmp_path, LIBRARY, numerics="fast") as fast, engine(tmp_path) as plain:
        assert gemm_leaves(fast) == {"torch.gemm_library"}
        (found,), (expected,) = fast.generate([request]), plain.generate([request])
    assert list(found.token_ids) == list(expected.token_ids)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("leaf", "what", "remedy"),
    [
        ("gem=torch.gemm_per_row", "there is no op gem", "did you mean gemm?"),
        (
            "gemm=torch.gemm_pre_row",
            "no leaf of op gemm is called torch.gemm_pre_row",
            "did you mean torch.gemm_per_row?",
        ),
        (
            "gemm=torch.head_packed",
            "no leaf of op gemm is called torch.head_packed",
            "did you mean torch.gemm_packed?",
        ),
        ("zzz=a", "there is no op zzz", "see --explain-numerics for the candidates"),
    ],
)
def test_a_name_that_does_not_exist_is_refused_with_the_nearest(
    tmp_path: Path, leaf: str, what: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        engine(tmp_path, leaf)
    (fault,) = caught.value.faults
    assert (fault.what, fault.remedy) == (what, remedy)
    assert fault.where == f"option leaf {leaf}, set by argument"


def test_all_unknown_names_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        engine(tmp_path, "gem=a", PER_ROW, "head=b")
    assert [one.what for one in caught.value.faults] == [
        "there is no op gem",
        "no leaf of op head is called b",
    ]


@pytest.mark.parametrize("leaf", ["gemm", "gemm=", "=torch.gemm_per_row", "GEMM=x", 7, None])
def test_what_is_no_pair_of_op_and_name_is_refused(leaf: object) -> None:
    with pytest.raises(PagedctlError) as caught:
        EngineConfig(leaf=(leaf,))  # type: ignore[arg-type]
    assert "leaf" in str(caught.value)
    assert "OP=NAME" in str(caught.value)


@pytest.mark.parametrize("given", [(PER_ROW,), [PER_ROW], PER_ROW])
def test_a_tuple_a_list_or_one_text_is_taken_from_python(given: Any) -> None:
    assert EngineConfig(leaf=given).leaf == (PER_ROW,)


# -- the command line ------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with folder_of_commands(tmp_path, monkeypatch, {}) as found:
        yield found


WORK = ("--workload", "decode:requests=1,prompt=3,output=2", "--warmup", "0", "--repeats", "1")


def bench(folder: Folder, *words: str, code: int = 0) -> dict[str, Any]:
    path = folder.path / "m.json"
    path.unlink(missing_ok=True)
    assert folder.run("bench", *WORK, "--quiet", *words, "--json", str(path)) == code
    return dict(read_manifest(path).raw)


def test_the_flag_and_the_plan_file_narrow_alike(folder: Folder) -> None:
    by_flag = bench(folder, "--leaf", PER_ROW, "--leaf", "head=torch.head_per_row")
    (folder.path / "narrow.toml").write_text(
        'schema = "pagedctl.plan/1"\nname = "p"\n'
        f'[numerics]\nleaf = ["{PER_ROW}", "head=torch.head_per_row"]\n'
    )
    by_plan = bench(folder, "--plan", "narrow.toml")
    assert by_flag["numerics"]["leaves"] == by_plan["numerics"]["leaves"]
    assert {"torch.gemm_per_row", "torch.head_per_row"} <= {*by_flag["numerics"]["leaves"].values()}
    assert by_flag["config"]["leaf"] == by_plan["config"]["leaf"]
    assert by_flag["config_origin"]["leaf"] == "flag"
    assert by_plan["config_origin"]["leaf"] == "plan narrow.toml"


def test_the_command_refuses_with_exit_code_2(
    folder: Folder, capfd: pytest.CaptureFixture[str]
) -> None:
    for words, first in (
        (("--leaf", "gemm=torch.gemm_pre_row"), "error: no leaf of op gemm is called"),
        (("--leaf", "gem=a"), "error: there is no op gem"),
        (("--leaf", LIBRARY), "error: no leaf of op gemm qualifies at qkv_proj"),
    ):
        capfd.readouterr()
        failed = bench(folder, *words, code=2)
        err = capfd.readouterr().err
        assert failed["status"] == "failed"
        assert any(line.startswith(first) for line in err.splitlines()), err
        assert "Traceback" not in err
    assert bench(folder, "--leaf", LIBRARY, "--numerics", "fast")["status"] == "complete"
