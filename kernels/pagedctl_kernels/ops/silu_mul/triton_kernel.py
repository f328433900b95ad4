"""The gated activation, one stretch of a row a program."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated(gate, up, ROUND_ACTIVATION: tl.constexpr):
    """silu(gate) * up of values in D, rounded once to D; the activation too if ROUND_ACTIVATION."""
    wide = gate.to(tl.float32)
    activated = tl.div_rn(wide, 1.0 + tl.exp(-wide))
    if ROUND_ACTIVATION:
        activated = activated.to(up.dtype).to(tl.float32)
    return (activated * up.to(tl.float32)).to(up.dtype)


@triton.jit
def silu_mul_stretch(
    gate_up,
    y,
    stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STRETCHES: tl.constexpr,
    ROUND_ACTIVATION: tl.constexpr,
):
    """gate_up D[T, 2 WIDTH], gate first -> y D[T, WIDTH], contiguous.

    STRETCHES programs of BLOCK columns share a row.
    """
    program = tl.program_id(0)
    row = (program // STRETCHES).to(tl.int64)
    columns = (program % STRETCHES) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    line = gate_up + row * stride
    gate = tl.load(line + columns, mask=inside, other=0.0)
    up = tl.load(line + WIDTH + columns, mask=inside, other=0.0)
    tl.store(y + row * WIDTH + columns, gated(gate, up, ROUND_ACTIVATION), mask=inside)
