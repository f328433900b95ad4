"""Folders of this machine that the environment names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def home_folder(environ: Mapping[str, str]) -> Path:
    """PAGEDCTL_HOME: records, digests, locks and compiled kernels.

    Default ``$XDG_DATA_HOME/pagedctl``, and ``~/.local/share/pagedctl`` without it.
    """
    named = environ.get("PAGEDCTL_HOME")
    if named:
        return Path(named)
    data_home = environ.get("XDG_DATA_HOME")
    base = Path(data_home) if data_home else Path.home() / ".local" / "share"
    return base / "pagedctl"


def runs_folder(environ: Mapping[str, str]) -> Path:
    """PAGEDCTL_RUNS_DIR: manifests of commands without an output; default ./pagedctl-runs."""
    return Path(environ.get("PAGEDCTL_RUNS_DIR") or "pagedctl-runs")
