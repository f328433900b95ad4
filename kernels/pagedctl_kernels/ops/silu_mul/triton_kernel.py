"""The gated activation, one stretch of a row a program."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def silu_mul_stretch(
    gate_up,
    y,
    stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STRETCHES: tl.constexpr,
    ROUND_ACTIVATION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """gate_up D[T, 2 WIDTH], gate first -> y D[T, WIDTH], contiguous.

    STRETCHES programs of BLOCK columns share a row.
    """
    program = tl.program_id(0)
    row = (program // STRETCHES).to(tl.int64)
    columns = (program % STRETCHES) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    line = gate_up + row * stride
    if EARLY:
        gdc_wait()
    gate = tl.load(line + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(line + WIDTH + columns, mask=inside, other=0.0)
    if EARLY:
        gdc_launch_dependents()
    activated = tl.div_rn(gate, 1.0 + tl.exp(-gate))
    if ROUND_ACTIVATION:
        activated = activated.to(up.dtype).to(tl.float32)
    tl.store(y + row * WIDTH + columns, (activated * up.to(tl.float32)).to(up.dtype), mask=inside)
