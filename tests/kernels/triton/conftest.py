"""Every Triton test runs with fresh memory full of NaN, on the CPU and on the GPU alike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.triton.harness import DEVICE


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty and friends give NaN (integers: their largest value) while a test runs.

    Only the filling is wanted: an operation without a deterministic form on CUDA warns, it does
    not raise.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3, device=DEVICE).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
