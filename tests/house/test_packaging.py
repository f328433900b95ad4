"""What is shipped, and that the folder ``kernels`` cannot be mistaken for a package."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Of the wheel built from a copy: a build leaves files beside its sources, where a second
    one, another worker's or an earlier interrupted one's, stumbles over them."""
    folder, sources = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, sources / name)
    for name in ("pagedctl", "kernels"):
        shutil.copytree(
            ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder)]
    subprocess.run([*command, str(sources)], check=True)
    (wheel,) = folder.glob("pagedctl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.xdist_group("wheel")
def test_one_wheel_holds_both_packages_and_their_data(wheel_names: set[str]) -> None:
    for name in (
        "pagedctl/cli/main.py",
        "pagedctl/py.typed",
        "pagedctl_kernels/registry.py",
        "pagedctl_kernels/py.typed",
        "pagedctl_kernels/ops/gemm/spec.py",
        "pagedctl_kernels/tile_tables/sm_90.json",
        "pagedctl/models/embedded/model.safetensors",
        "pagedctl/models/embedded/tokenizer.json",
        "pagedctl/models/embedded/config.json",
    ):
        assert name in wheel_names


@pytest.mark.xdist_group("wheel")
def test_the_wheel_holds_nothing_else(wheel_names: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "pagedctl",
        "pagedctl_kernels",
    }


def test_the_kernels_folder_is_at_most_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face publishes a package of that name and transformers probes for it."""
    monkeypatch.syspath_prepend(str(ROOT))
    importlib.invalidate_caches()
    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is None


def test_transformers_loads_and_runs_a_model_from_the_repository_root() -> None:
    pytest.importorskip("transformers")
    code = (
        "import torch\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        "config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1,\n"
        "    num_attention_heads=2, num_key_value_heads=2, vocab_size=64)\n"
        "logits = LlamaForCausalLM(config)(torch.tensor([[1, 2, 3]])).logits\n"
        "print(tuple(logits.shape), bool(torch.isfinite(logits).all()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "(1, 3, 64) True"
