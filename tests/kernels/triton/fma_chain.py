"""The order of float32 products on Hopper, written out: one fused multiply-add a step."""

import torch


def fma_chain(x: torch.Tensor, w: torch.Tensor, *, descending: bool = False) -> torch.Tensor:
    """x [M, K], w [N, K] float32 -> sums [M, N]: s = fl(x w + s) over k, padded to 32.

    A step is exact in float64 but for its last bit, which is set if anything was left over
    (rounding to odd); the rounding to float32 that follows is then the only one.
    """
    k = x.shape[1]
    steps = list(range(k)) + [None] * (-k % 32)
    sums = torch.zeros(x.shape[0], w.shape[0], dtype=torch.float32, device=x.device)
    for step in reversed(steps) if descending else steps:
        if step is None:
            sums = sums + 0.0
            continue
        product = x[:, step, None].double() * w[:, step].double()
        sums = _odd_sum(product, sums.double()).float()
    return sums


def rounded_products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The same chain with every product rounded before it is added."""
    sums = torch.zeros(x.shape[0], w.shape[0], dtype=torch.float32, device=x.device)
    for step in range(x.shape[1]):
        sums = sums + x[:, step, None] * w[:, step]
    return sums


def _odd_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a + b in float64, rounded to odd: the error of the sum is exact (two-sum)."""
    total = a + b
    back = total - a
    error = (a - (total - back)) + (b - back)
    pattern = total.view(torch.int64)
    towards = torch.where((error > 0) == (total > 0), 1, -1)
    odd = (pattern + towards).view(torch.float64)
    return torch.where((error != 0) & (pattern % 2 == 0), odd, total)
