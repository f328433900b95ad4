"""Shared fixtures: the command line as a subprocess, the gpu and smollm2 markers, and the Triton
interpreter where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

if os.environ.get("PYTEST_XDIST_WORKER"):
    # Two workers with two threads each on two cores wait for each other in spinning barriers.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/nvidia0")):
    # Triton reads it when a kernel is declared, so it is set before any test module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

SMOLLM2 = "PAGEDCTL_TEST_SMOLLM2"
"""Names the folder of a SmolLM2-135M-Instruct snapshot."""

Cli = Callable[..., subprocess.CompletedProcess[str]]


def python_path(*folders: Path) -> str:
    """PYTHONPATH with *folders* in front of what a child process needs to find us."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get(SMOLLM2):
        skip = pytest.mark.skip(
            reason=f"{SMOLLM2} names no snapshot; python scripts/make_smollm2.py FOLDER makes one"
        )
        for item in items:
            if item.get_closest_marker("smollm2"):
                item.add_marker(skip)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in gpu_items:
        item.add_marker(skip)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The snapshot folder, for tests marked ``smollm2``."""
    return Path(os.environ[SMOLLM2])


@pytest.fixture
def clean_environ(tmp_path: Path) -> dict[str, str]:
    """This process's environment without variables of ours, with a home of its own."""
    ours = ("PAGEDCTL_", "TRITON_INTERPRET")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "PAGEDCTL_HOME": str(tmp_path / "home"), "NO_COLOR": "1"}


@pytest.fixture
def cli(tmp_path: Path, clean_environ: dict[str, str]) -> Cli:
    """Run ``pagedctl`` in an empty folder: ``cli("env", "--json", env={...})``."""

    def run(
        *words: str, env: Mapping[str, str] | None = None, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pagedctl", *words],
            cwd=tmp_path,
            env={**clean_environ, **(env or {})},
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run
