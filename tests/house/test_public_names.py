"""The library's names: all there, lazy, and the example of the README runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pagedctl

ROOT = Path(__file__).resolve().parents[2]


def test_every_public_name_loads() -> None:
    for name in pagedctl.__all__:
        assert getattr(pagedctl, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(pagedctl, "Enginee")


def test_the_readme_example_runs() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert [line.split()[0] for line in done.stdout.splitlines() if line[0].isdigit()] == [
        "0",
        "1",
        "2",
        "3",
    ]
