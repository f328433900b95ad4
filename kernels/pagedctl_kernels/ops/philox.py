"""Philox4x32-10 on int64 tensors: counter-based random words, the same on every device."""

from __future__ import annotations

import torch

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

WORD = 0xFFFFFFFF
ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

SAMPLING = 0
"""The counter's purpose word for the draw of a token."""


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Four random words in [0, 2^32) for each counter, int64.

    The counter's words are tensors of one shape; the key's are of that shape too, or scalars.

    Only what is multiplied has to be reduced to 32 bits: the upper halves of the rest are cut
    off with the next mask. A 32-bit product fills 64 bits; its upper half comes out of the
    wrapped int64 product by a shift and that mask, since wrapping keeps the bit pattern.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(ROUNDS):
        high, low = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (low >> 32).bitwise_xor_(c1).bitwise_xor_(k0 + number * _WEYL[0]).bitwise_and_(WORD)
        c2 = (high >> 32).bitwise_xor_(c3).bitwise_xor_(k1 + number * _WEYL[1]).bitwise_and_(WORD)
        c1, c3 = low, high
    return c0, c1 & WORD, c2, c3 & WORD


def token_words(
    seed: torch.Tensor, position: torch.Tensor, token_group: torch.Tensor
) -> torch.Tensor:
    """Random words int64[G, 4] of tokens 4 g .. 4 g + 3, one group g = id div 4 a row.

    seed int64[G] in [0, 2^53), position int64[G], token_group int64[G].
    Counter (token_group, position, purpose, 0), key (seed mod 2^32, seed div 2^32).
    """
    purpose = torch.full_like(token_group, SAMPLING)
    counter = (token_group, position & WORD, purpose, torch.zeros_like(token_group))
    return torch.stack(philox4x32(counter, (seed & WORD, seed >> 32)), dim=-1)
