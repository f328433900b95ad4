"""A failed allocation as a refusal that says what did not fit and what helps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pagedctl.errors import CapacityError

_TOO_LARGE = ("DefaultCPUAllocator", "Storage size calculation overflowed")
"""In torch's plain RuntimeErrors: of its CPU allocator, and of a tensor beyond 2^63 bytes."""


@contextmanager
def refused_if_out_of_memory(what: str, *, where: str, rule: str, remedy: str) -> Iterator[None]:
    """Run the block; where it cannot allocate memory, raise CapacityError instead."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise CapacityError(what, where=where, rule=rule, remedy=remedy) from None
    except RuntimeError as error:
        if not any(words in str(error) for words in _TOO_LARGE):
            raise
        raise CapacityError(what, where=where, rule=rule, remedy=remedy) from None
