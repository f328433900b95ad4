"""Where cases get their operands and leaves: one device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from pagedctl_kernels.catalogue import house_registry
from pagedctl_kernels.leaf import BATCH_INVARIANT, DETERMINISTIC, CallSite, Requirement
from pagedctl_kernels.machine import Machine, this_machine
from pagedctl_kernels.plan import plan
from pagedctl_kernels.registry import NoLeafError

CONTRACT = Requirement(features=frozenset({BATCH_INVARIANT, DETERMINISTIC}))


@dataclass(frozen=True)
class Bench:
    """``cuda``; the cases can also be built, and their launches tried, on ``cpu``."""

    device: str

    @cached_property
    def machine(self) -> Machine:
        return this_machine(self.device)

    def leaf(self, site: CallSite) -> Any | None:
        """The implementation that serves *site* under a contract; None if there is none."""
        try:
            return plan(house_registry(), site, self.machine, CONTRACT).run
        except NoLeafError:
            return None

    def gaussian(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype)
