"""Facts about the machine and the installation: true, without secrets, or with a reason."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import types
from pathlib import Path

import pytest

import pagedctl
from pagedctl.manifest.environment import (
    recorded_env,
    tool_info,
    versions,
)
from pagedctl.manifest.hardware import DeviceSurvey

NO_GPU = DeviceSurvey(devices=(), driver=None, driver_cuda=None, reason="no driver here")


def test_the_package_imports_no_torch_triton_or_numpy() -> None:
    script = (
        "import sys\n"
        "from pagedctl.manifest import environment, reader, writer\n"
        "environment.tool_info(), environment.versions(), environment.cpu_info()\n"
        "print([m for m in ('torch', 'triton', 'transformers', 'numpy') if m in sys.modules])"
    )
    completed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert completed.stdout == "[]\n"


# -- the tool ----------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    completed = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return completed.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git checkout with a package folder; returns the package folder."""
    package = tmp_path / "checkout" / "pagedctl"
    package.mkdir(parents=True)
    (package / "a.py").write_text("x = 1\n")
    git(package.parent, "init", "-q")
    return package


def commit(package: Path) -> str:
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-q", "-m", "first")
    return git(package.parent, "rev-parse", "HEAD")


def test_a_checkout_gives_its_commit_and_whether_the_package_differs(checkout: Path) -> None:
    head = commit(checkout)
    info = tool_info(checkout)
    assert info.version == pagedctl.__version__
    assert info.commit is not None
    assert head.startswith(info.commit)
    assert len(info.commit) >= 12
    assert info.dirty is False
    (checkout.parent / "result.json").write_text("{}")
    assert tool_info(checkout).dirty is False, "a result file is no change of the program"
    (checkout / "new.py").write_text("")
    assert tool_info(checkout).dirty is True


def test_a_changed_kernel_package_is_dirty_too(checkout: Path) -> None:
    kernel = checkout.parent / "kernels" / "k.py"
    kernel.parent.mkdir()
    kernel.write_text("1\n")
    commit(checkout)
    assert tool_info(checkout).dirty is False
    kernel.write_text("2\n")
    assert tool_info(checkout).dirty is True


def test_a_package_inside_another_projects_checkout_reports_no_commit(checkout: Path) -> None:
    commit(checkout)
    installed = checkout.parent / ".venv" / "site-packages" / "pagedctl"
    installed.mkdir(parents=True)
    info = tool_info(installed)
    assert info.commit is None
    assert info.commit_reason == "not run from a git checkout"


def test_a_checkout_without_commits_gives_a_reason(checkout: Path) -> None:
    info = tool_info(checkout)
    assert info.commit is None
    assert info.commit_reason is not None
    assert info.commit_reason.startswith("git failed: ")


def test_a_machine_without_git_gives_a_reason(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commit(checkout)
    monkeypatch.setenv("PATH", str(tmp_path))
    info = tool_info(checkout)
    assert (info.commit, info.dirty, info.commit_reason) == (None, None, "git is not installed")


def test_git_variables_of_a_surrounding_hook_do_not_mislead(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    head = commit(checkout)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    info = tool_info(checkout)
    assert info.commit is not None
    assert head.startswith(info.commit)


# -- versions ----------------------------------------------------------------------------


def test_versions_are_those_of_the_modules_themselves() -> None:
    import numpy
    import orjson
    import torch

    found = versions(NO_GPU, torch=torch)
    assert found["torch"] == torch.__version__
    assert found["cuda"] == torch.version.cuda
    assert found["numpy"] == numpy.__version__
    assert found["orjson"] == orjson.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))


def test_every_version_that_is_null_has_a_reason() -> None:
    found = versions(NO_GPU)
    absent = [name for name, value in found.items() if value is None]
    assert "driver" in absent
    assert "nccl" in absent
    for name in absent:
        assert found[f"{name}_reason"]
    assert found["driver_reason"] == "no driver here"


def test_a_package_that_is_not_installed_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    found = versions(NO_GPU)
    for name in ("torch", "triton", "transformers"):
        assert found[name] is None
        assert found[f"{name}_reason"] == "not installed"


def test_a_torch_without_a_version_file_is_known_by_its_metadata(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    info = tmp_path / "torch-2.99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: torch\nVersion: 2.99.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert versions(NO_GPU)["torch"] == "2.99.0"
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.99.0+cu130'\ncuda: Optional[str] = '13.0'\n"
    )
    found = versions(NO_GPU)
    assert (found["torch"], found["cuda"]) == ("2.99.0+cu130", "13.0")


def test_nccl_is_what_an_imported_cuda_torch_says() -> None:
    torch = types.ModuleType("torch")
    torch.version = types.SimpleNamespace(cuda="13.0")  # type: ignore[attr-defined]
    torch.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        nccl=types.SimpleNamespace(version=lambda: (2, 28, 9))
    )
    assert versions(NO_GPU, torch=torch)["nccl"] == "2.28.9"


# -- environment variables -----------------------------------------------------------------


def test_what_changes_a_result_is_recorded_and_secrets_are_not() -> None:
    environ = {
        "NCCL_PROTO": "Simple",
        "CUDA_VISIBLE_DEVICES": "0",
        "TORCH_LOGS": "",
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "2",
        "MKL_CBWR": "COMPATIBLE",
        "ATEN_CPU_CAPABILITY": "avx2",
        "HF_HOME": "/hf",
        "PAGEDCTL_MODEL": "embedded",
        "PAGEDCTL_API_KEY": "s3cret",
        "TORCH_HUB_token": "s3cret",
        "CUDA_PASSWORD": "s3cret",
        "NCCL_CREDENTIALS_FILE": "s3cret",
        "PAGEDCTL_PLAN": "https://me:s3cret@host/plan.toml",
        "HF_TOKEN": "s3cret",
        "AWS_SECRET_ACCESS_KEY": "s3cret",
        "HOME": "/root",
        "MY_NCCL_PROTO": "x",
    }
    found = recorded_env(environ)
    assert set(found) == {
        "NCCL_PROTO", "CUDA_VISIBLE_DEVICES", "TORCH_LOGS", "TRITON_INTERPRET", "OMP_NUM_THREADS",
        "MKL_CBWR", "ATEN_CPU_CAPABILITY", "HF_HOME", "PAGEDCTL_MODEL",
    }  # fmt: skip
    assert list(found) == sorted(found)
    assert "s3cret" not in str(found)
    assert found["TORCH_LOGS"] == "", "set to nothing is not the same as not set"
