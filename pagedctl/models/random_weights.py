"""Weights from a seed: a value is a function of (seed, tensor name, flat index) alone.

The Philox4x32-10 block that belongs to values 8 b .. 8 b + 7 of a tensor has

    key     = the first 64 bits, big-endian, of SHA-256 over ``pagedctl.weights/1:<seed>:<name>``,
              as (low word, high word)
    counter = (b mod 2^32, b div 2^32, 1, 0)        1 is the purpose word of weights

Its 128 bits, lowest first, are eight levels of 16 bits, one a value. Level u stands for the
standard normal quantile z at (u + 1/2) / 2^16, taken on the host in float64; the value is z
times the tensor's standard deviation, rounded to float32 and then to the model's dtype. A
device only computes integers and looks values up, so every device, chunk and shard has the
same bits, and a bfloat16 model is the float32 model rounded.

    projections, untied embedding   N(0, 0.02)
    norms                           1
    biases                          N(0, 0.02): a bias that is forgotten changes the output
    lm_head                         N(0, 4.5 / sqrt(hidden)): the last norm leaves a root mean
                                    square of 1, so logits have a standard deviation of 4.5
    tied head                       the embedding keeps N(0, 0.02) and the last norm has
                                    +-4.5 / (0.02 sqrt(hidden)), each sign of probability 1/2.
                                    Without the signs a token's own logit would tower over the
                                    others (the residual stream still holds its embedding), and
                                    the model would repeat its input
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import prod, sqrt
from statistics import NormalDist
from typing import Literal

import torch

from pagedctl.models.architecture import TensorSpec
from pagedctl.models.spec import ModelSpec
from pagedctl.models.tensor_parallel import local_shape, require_tp, shard_bounds
from pagedctl_kernels.ops.philox import WORD, philox4x32

MATRIX_STD = 0.02
LOGIT_STD = 4.5
LEVEL_BITS = 16
LEVELS = 1 << LEVEL_BITS
BLOCK_VALUES = 8
PURPOSE = 1
CPU_CHUNK_VALUES = 1 << 16  # a chunk's words stay in the cache of one core
DEVICE_CHUNK_VALUES = 1 << 24  # a launch costs less than its work


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """N(0, scale^2), or +scale and -scale of probability 1/2 each, or scale itself."""

    kind: Literal["normal", "signs", "constant"]
    scale: float


def distribution_of(spec: ModelSpec, tensor: TensorSpec) -> Distribution:
    """What the values of *tensor* are drawn from; the scheme of the module's docstring."""
    if tensor.role == "lm_head":
        return Distribution(kind="normal", scale=LOGIT_STD / sqrt(spec.hidden_size))
    if tensor.role == "norm" and spec.tie_word_embeddings:
        scale = LOGIT_STD / (MATRIX_STD * sqrt(spec.hidden_size))
        return Distribution(kind="signs", scale=scale)
    if tensor.is_matrix or tensor.part == "bias":
        return Distribution(kind="normal", scale=MATRIX_STD)
    return Distribution(kind="constant", scale=1.0)


def random_weights(
    spec: ModelSpec, seed: int, *, device: torch.device | str, tp: int = 1, rank: int = 0
) -> dict[str, torch.Tensor]:
    """The weights of *seed* by Hugging Face name, in ``spec.dtype``: the rank's part of each.

    Vocabulary rows that pad the last ranks are zero. Extra memory: one chunk.
    """
    require_tp(spec, tp)
    maker = RandomWeights(spec, seed, device=device)
    return {one.name: maker.shard(one, tp=tp, rank=rank) for one in spec.tensors}


class RandomWeights:
    """Makes the tensors of one (spec, seed), whole or in parts, on one device."""

    def __init__(
        self,
        spec: ModelSpec,
        seed: int,
        *,
        device: torch.device | str,
        chunk_values: int | None = None,
    ) -> None:
        self.spec = spec
        self.seed = seed
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        on_cpu = self.device.type == "cpu"
        self._chunk = chunk_values or (CPU_CHUNK_VALUES if on_cpu else DEVICE_CHUNK_VALUES)
        self._quantiles = normal_quantiles()
        self._values: dict[Distribution, torch.Tensor] = {}

    def shard(self, tensor: TensorSpec, *, tp: int, rank: int) -> torch.Tensor:
        """The part of *tensor* that the rank holds, of ``local_shape``."""
        if tp == 1:
            return self.rows(tensor, 0, tensor.shape[0])
        start, stop = shard_bounds(self.spec, tensor, tp=tp, rank=rank)
        if tensor.shard == "columns":
            return self.columns(tensor, start, stop)
        shape = local_shape(self.spec, tensor, tp)
        result = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._fill(result[: stop - start], tensor, start)
        result[stop - start :] = 0
        return result

    def rows(self, tensor: TensorSpec, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of *tensor* (elements, of a vector); no other row is made."""
        shape = (stop - start, *tensor.shape[1:])
        result = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._fill(result, tensor, start)
        return result

    def columns(self, tensor: TensorSpec, start: int, stop: int) -> torch.Tensor:
        """Columns [start, stop) of a matrix; whole rows are made a chunk at a time."""
        height, width = tensor.shape
        result = torch.empty((height, stop - start), dtype=self.dtype, device=self.device)
        step = max(1, self._chunk // width)
        for row in range(0, height, step):
            last = min(row + step, height)
            result[row:last] = self.rows(tensor, row, last)[:, start:stop]
        return result

    def _fill(self, result: torch.Tensor, tensor: TensorSpec, first_row: int) -> None:
        """Write the rows from *first_row* on into *result*, which is contiguous."""
        distribution = distribution_of(self.spec, tensor)
        if distribution.kind == "constant":
            result.fill_(distribution.scale)
            return
        values = self._values_of(distribution)
        key = stream_key(self.seed, tensor.name)
        flat, first = result.view(-1), first_row * prod(tensor.shape[1:])
        for start in range(0, flat.numel(), self._chunk):
            stop = min(start + self._chunk, flat.numel())
            levels = random_levels(key, first + start, first + stop, device=self.device)
            torch.index_select(values, 0, levels, out=flat[start:stop])

    def _values_of(self, distribution: Distribution) -> torch.Tensor:
        """The value of each level, in the model's dtype on the device; made once."""
        if distribution not in self._values:
            standard = self._quantiles
            if distribution.kind == "signs":
                standard = standard.sign()
            scaled = standard * distribution.scale
            if self.dtype != torch.float64:
                scaled = scaled.to(torch.float32)
            self._values[distribution] = scaled.to(self.dtype).to(self.device)
        return self._values[distribution]


def normal_quantiles() -> torch.Tensor:
    """The standard normal quantile of each level, float64[2^16] on the host, ascending."""
    normal = NormalDist()
    quantiles = [normal.inv_cdf((level + 0.5) / LEVELS) for level in range(LEVELS)]
    return torch.tensor(quantiles, dtype=torch.float64)


def stream_key(seed: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The Philox key of one tensor, as int64 scalars on the host."""
    digest = hashlib.sha256(f"pagedctl.weights/1:{seed}:{name}".encode()).digest()
    number = int.from_bytes(digest[:8], "big")
    return torch.tensor(number & WORD), torch.tensor(number >> 32)


def random_levels(
    key: tuple[torch.Tensor, torch.Tensor], start: int, stop: int, *, device: torch.device
) -> torch.Tensor:
    """Levels int64[stop - start] in [0, 2^16) of the values with flat index [start, stop)."""
    first_block, last_block = start // BLOCK_VALUES, -(-stop // BLOCK_VALUES)
    block = torch.arange(first_block, last_block, device=device)
    purpose = torch.full_like(block, PURPOSE)
    counter = (block & WORD, block >> 32, purpose, torch.zeros_like(block))
    words = torch.stack(philox4x32(counter, key), dim=-1)
    halves = torch.stack((words & (LEVELS - 1), words >> LEVEL_BITS), dim=-1).flatten()
    skipped = start - first_block * BLOCK_VALUES
    return halves[skipped : skipped + stop - start]
