"""pagedctl: a paged-KV, continuous-batching sampler that states its numerical contract.

Importing this package imports no torch; the names below load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pagedctl.config.engine_config import EngineConfig
    from pagedctl.engine.engine import Engine
    from pagedctl.engine.request import Capacity, Completion, Request, SamplingParams, Stats
    from pagedctl.numerics.random_stream import derive_seed

_HOMES = {
    "Capacity": "pagedctl.engine.request",
    "Completion": "pagedctl.engine.request",
    "Engine": "pagedctl.engine.engine",
    "EngineConfig": "pagedctl.config.engine_config",
    "Request": "pagedctl.engine.request",
    "SamplingParams": "pagedctl.engine.request",
    "Stats": "pagedctl.engine.request",
    "derive_seed": "pagedctl.numerics.random_stream",
}

__all__ = [
    "Capacity",
    "Completion",
    "Engine",
    "EngineConfig",
    "Request",
    "SamplingParams",
    "Stats",
    "derive_seed",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
