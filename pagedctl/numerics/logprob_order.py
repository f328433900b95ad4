"""The spelling of a logprob order: ``torch``, ``blockwise[-W]``, ``blockwise-direct[-W]``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pagedctl.numerics.switches import LOGPROB_ORDER_PATTERN
from pagedctl_kernels.house import LOGPROB_BLOCK


@dataclass(frozen=True, kw_only=True)
class LogprobOrder:
    """The form of the last subtraction and the width of a sum-exp block, in columns.

    ``explicit`` marks a width that claims a trainer's shard width.
    """

    form: str
    block_size: int
    explicit: bool


def parse_logprob_order(text: str) -> LogprobOrder:
    """``blockwise-direct-16384`` -> form ``blockwise-direct``, 16384 columns, explicit."""
    if not re.fullmatch(LOGPROB_ORDER_PATTERN, text):
        raise ValueError(f"{text!r} is not a logprob order")
    form, _, width = text.rpartition("-")
    if width.isdigit():
        return LogprobOrder(form=form, block_size=int(width), explicit=True)
    return LogprobOrder(form=text, block_size=LOGPROB_BLOCK, explicit=False)
