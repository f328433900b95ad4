"""One digest of a set of weights, the same for a file, a set of shards and a live model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

CHUNK_BYTES = 1 << 26  # leave the device at once


def weights_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """``sha256:...`` over (Hugging Face name, dtype, shape, bytes), sorted by name.

    Takes the pairs in any order and one at a time, so shards may be read as they come. A tied
    head is the embedding and is not a tensor of its own: leave it out, as its file does.
    """
    digests = tensor_digests(tensors)
    lines = (f"{name} {digests[name]}\n" for name in sorted(digests))
    return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"


def tensor_digests(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """``sha256:...`` over dtype, shape and bytes of each tensor, by name."""
    digests: dict[str, str] = {}
    for name, tensor in tensors:
        if name in digests:
            raise ValueError(f"{name} is given twice")
        digests[name] = _tensor_digest(tensor)
    return digests


def _tensor_digest(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    digest = hashlib.sha256(f"{dtype} {list(tensor.shape)}\n".encode())
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for start in range(0, flat.numel(), CHUNK_BYTES):
        digest.update(flat[start : start + CHUNK_BYTES].cpu().numpy().data)
    return f"sha256:{digest.hexdigest()}"
