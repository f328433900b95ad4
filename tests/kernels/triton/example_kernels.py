"""Kernels for the tests of the compile report: what it must see, and what it must not mistake."""

import triton
import triton.language as tl


@triton.jit
def multiply_add(x, y, out, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    product = tl.load(x + place) * tl.load(y + place)
    tl.store(out + place, product + tl.load(out + place))


@triton.jit
def sum_and_product(x, y, out, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    a, b = tl.load(x + place), tl.load(y + place)
    tl.store(out + place, (a + b).to(tl.bfloat16))
    tl.store(out + BLOCK + place, (a * b).to(tl.bfloat16))


@triton.jit
def root_of_quotient(x, y):
    return tl.sqrt_rn(tl.div_rn(x, y))


@triton.jit
def divide(x, y, out, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out + place, root_of_quotient(tl.load(x + place), tl.load(y + place)))


@triton.jit
def divide_roughly(x, y, out, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(x + place) / tl.load(y + place))


@triton.jit
def add_atomically(x, y, out, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.atomic_add(out + place * 0, tl.load(x + place) + tl.load(y + place))


@triton.jit
def product(x, y, out, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    rows, columns = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    place = rows * BLOCK + columns
    tl.store(
        out + place,
        tl.dot(tl.load(x + place), tl.load(y + place), input_precision=PRECISION),
    )
