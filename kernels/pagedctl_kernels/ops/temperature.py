"""Temperature: the one operation between logits and what is sampled or scored."""

from __future__ import annotations

import torch


def scale_logits(logits: torch.Tensor, temperature: torch.Tensor, form: str) -> torch.Tensor:
    """z A[R, V] from logits A[R, V] and temperature A[R].

    ``divide``: one division per logit. ``multiply``: one product with fl(1 / T). Rows at
    T = 0 and T = 1 keep their logits bit for bit (dividing by one is exact).
    """
    divisor = torch.where(temperature == 0, torch.ones_like(temperature), temperature)
    if form == "multiply":
        return logits * (1 / divisor).unsqueeze(-1)
    return logits / divisor.unsqueeze(-1)
