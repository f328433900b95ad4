"""Seeds: pure functions of the run seed and the request, stable over versions. No torch."""

from __future__ import annotations

import hashlib

SEED_BITS = 53
"""Seeds stay below 2^53, so that every JSON reader keeps them exactly."""


def derive_seed(seed: int, key: int | str) -> int:
    """A seed below 2^53 from a seed and a key: a request's id, or a sample's number.

    The first 53 bits, big-endian, of SHA-256 over ``pagedctl.seed/1:<seed>:<key>``. An integer
    key stands as its decimal digits.
    """
    if not 0 <= seed < 1 << SEED_BITS:
        raise ValueError(f"seed {seed} is not in [0, 2^{SEED_BITS})")
    digest = hashlib.sha256(f"pagedctl.seed/1:{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)


def sample_seed(request_seed: int, sample: int) -> int:
    """The seed of one sample of a request: sample 0 uses the request's own."""
    return request_seed if sample == 0 else derive_seed(request_seed, sample)
