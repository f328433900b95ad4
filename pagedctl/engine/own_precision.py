"""Keeps a caller's autocast out of the engine: what it computes in is the contract's choice."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def own_precision(device: str) -> AbstractContextManager[None]:
    """No autocast in the block, on a *device* such as ``cpu``.

    A training loop runs under autocast, and an engine is called from inside it. Autocast would
    narrow products that no order says are narrowed (measured: other bits from float16).
    """
    return torch.autocast(device, enabled=False)
