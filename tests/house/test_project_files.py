"""The project's own pages and scripts."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("script", ["write_docs.py", "write_examples.py"])
def test_generated_files_are_current(script: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_ci_calls_the_test_command_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "scripts/quickstart" in readme
    assert "scripts/test" in readme
    assert "scripts/test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_every_module_says_its_duty() -> None:
    silent = [
        path
        for base in ("pagedctl", "kernels", "scripts", "tests")
        for path in (ROOT / base).rglob("*.py")
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert silent == []
