"""What one call of ``Engine.step`` did: data for benchmarks and displays. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from pagedctl.engine.request import RequestId


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step: what was launched, and what was committed while the device worked.

    ``num_rows`` sequences with ``num_tokens`` tokens were scheduled, to sample ``num_sampled``.
    ``committed`` lists (request id, sample, tokens committed for it). ``running``, ``waiting``
    and ``used_blocks`` are counts after the step.
    """

    step: int
    num_rows: int
    num_tokens: int
    num_sampled: int
    committed: tuple[tuple[RequestId, int, int], ...]
    running: int
    waiting: int
    used_blocks: int
