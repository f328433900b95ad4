"""The project's own pages and scripts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_generated_pages_are_current() -> None:
    script = ROOT / "scripts" / "write_docs.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
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
        if not path.read_text(encoding="utf-8").lstrip().startswith('"""')
    ]
    assert silent == []
