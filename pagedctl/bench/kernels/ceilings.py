"""What this GPU does at best, measured now: the floors of the benchmark rest on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from pagedctl.bench.kernels.replay import Timing, launched
from pagedctl.bench.kernels.triton_read import BLOCK, PROGRAMS, read_all

_READ_BYTES = 8 * 2**30
_SIDE = 8192


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """``read`` in bytes and ``multiply`` in bfloat16 operations, a microsecond."""

    read: float
    multiply: float

    def floor_us(self, moved_bytes: int, operations: int) -> float:
        """No kernel is faster that moves so many bytes and does so many operations."""
        return max(moved_bytes / self.read, operations / self.multiply)


def measure_ceilings() -> Ceilings:
    """Reads 8 GiB and multiplies 8192^3 random bfloat16 numbers; the best trials count."""
    data = torch.randint(2**31 - 1, (_READ_BYTES // 4,), device="cuda", dtype=torch.int32)
    out = torch.empty(PROGRAMS, device="cuda", dtype=torch.int32)
    read = partial(read_all[(PROGRAMS,)], data, out, len(data) // BLOCK, BLOCK=BLOCK, num_warps=8)
    a, b = (torch.randn(_SIDE, _SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found = launched({"read": [read], "multiply": [partial(torch.mm, a, b)]})
    return Ceilings(
        read=_READ_BYTES / _best(found["read"]), multiply=2 * _SIDE**3 / _best(found["multiply"])
    )


def _best(timing: Timing) -> float:
    return min(timing.trials_us)
