"""Signatures of the ops: what every leaf's ``run`` takes and returns. Torch-free to import.

D is the model's dtype, A the internal one. T counts tokens of a step, R rows that are sampled
or scored, S sequences, V vocabulary columns, P rows of the RoPE table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import torch

    HostInts = torch.Tensor | np.ndarray[Any, np.dtype[np.int32]]

Work = TypeVar("Work")


@dataclass(frozen=True, kw_only=True)
class PreparedLinear:
    """A weight in the form that one leaf reads, [n, k] whatever the leaf did to it.

    ``weight`` may be padded in its first dimension (zero rows) and may share memory with the
    checkpoint's tensor where no conversion was needed. A weight update refreshes it in place.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    k: int
    n: int


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """The batch of one step, on the host.

    ``query_start_loc`` int32[S + 1]: prefix sums of the query lengths in the flat batch.
    ``seq_lens`` int32[S]: keys of each sequence, this step's included; the queries are its
    last tokens. ``block_tables`` int32[S, max_blocks]: logical to physical block.

    Example, one decode (41 keys) and one prefill chunk of 3 tokens (19 keys), block_size 16:
    ``query_start_loc=[0, 1, 4]``, ``seq_lens=[41, 19]``,
    ``block_tables=[[7, 3, 9], [2, 5, 0]]``.
    """

    query_start_loc: HostInts
    seq_lens: HostInts
    block_tables: HostInts


@dataclass(frozen=True, kw_only=True)
class EditedRows:
    """How E of R rows of logits are edited, and the tables of S slots that say so.

    ``row`` int64[E]: a row of the logits, each at most once; ``slot`` int64[E]: its row of the
    tables. ``repetition``, ``presence``, ``frequency`` A[E] (off: 1, 0, 0). ``bias`` A[S, V]:
    -infinity where a token is not allowed, -0.0 where it has no bias (no sum changes by it).
    ``in_prompt`` bool[S, V] and ``counts`` int32[S, V]: the prompt's tokens, and how often each
    token stands in the output. ``barred_row``, ``barred_token`` int64[B]: tokens that a row of
    the logits may not draw yet, each pair at most once, in rows of E or in others.
    """

    row: torch.Tensor
    slot: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    bias: torch.Tensor
    in_prompt: torch.Tensor
    counts: torch.Tensor
    barred_row: torch.Tensor
    barred_token: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """How each of R rows is sampled.

    ``temperature`` A[R] (0 = greedy), ``top_k`` int64[R] (0, -1 or >= V: off), ``top_p``
    float64[R] in (0, 1] (1: off), ``min_p`` A[R] in [0, 1] (0: off), ``seed`` int64[R] in
    [0, 2^53), ``position`` int64[R]: absolute position of the token being drawn.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class SampledRows:
    """``token_ids`` int64[R]; ``faulty`` bool[R]: the row was not finite and its id is 0."""

    token_ids: torch.Tensor
    faulty: torch.Tensor


class Embedding(Protocol):
    def __call__(self, token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """int64[T], D[V, H] -> D[T, H]."""


class RmsNorm(Protocol):
    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """D[T, H], D[H], D[T, H] or None -> (y D[T, H], residual stream h D[T, H])."""


class Linear(Protocol):
    """gemm and head; the head's output is A."""

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PreparedLinear:
        """weight D[N, K], bias D[N] or None."""

    def refresh(
        self, prepared: PreparedLinear, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Put another weight in the place of the one that this leaf prepared.

        *prepared* keeps its tensors, which get the bits that ``prepare`` would give them. Where
        it shares the memory of *weight*, nothing is copied.
        """

    def __call__(self, x: torch.Tensor, prepared: PreparedLinear) -> torch.Tensor:
        """D[T, K] -> D[T, N] (gemm) or A[T, N] (head)."""


class QkNormRopeWrite(Protocol):
    def __call__(
        self,
        qkv: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        """D[T, (Hq + 2 Hkv) Dh] -> q D[T, Hq, Dh]; writes k and v into the caches.

        q_weight and k_weight D[Dh]; cos_sin A[P, rotary_dim] (cos half, sin half); positions
        int64[T]; slot_mapping int64[T] (block * block_size + offset; negative: writes
        nothing); caches [num_blocks, Hkv, block_size, Dh] in the site's kv dtype.
        """


class Attention(Protocol[Work]):
    def prepare(self, metadata: AttentionMetadata) -> Work:
        """The step's work, built once on the host and used by every layer."""

    def __call__(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, work: Work
    ) -> torch.Tensor:
        """q D[T, Hq, Dh], caches [num_blocks, Hkv, block_size, Dh] -> D[T, Hq, Dh]."""


class SiluMul(Protocol):
    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """D[T, 2 I] (gate, then up) -> D[T, I]."""


class BlockSumexp(Protocol):
    def __call__(self, shifted: torch.Tensor, *, block_size: int) -> torch.Tensor:
        """A[R, V] -> A[R, ceil(V / block_size)]: sums of exp over blocks of columns."""


class Logprob(Protocol):
    def __call__(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        token_ids: torch.Tensor,
        *,
        block_sumexp: BlockSumexp,
    ) -> torch.Tensor:
        """A[R, V], A[R], int64[R, K] -> A[R, K]: the logprobs of K tokens of each row.

        A token's bits are the same for every K and whatever stands beside it.
        """

    def likeliest(
        self, logits: torch.Tensor, temperature: torch.Tensor, count: int
    ) -> torch.Tensor:
        """A[R, V], A[R] -> int64[R, count]: ids by (z descending, id ascending)."""


class LogitEdits(Protocol):
    def __call__(self, logits: torch.Tensor, edits: EditedRows) -> None:
        """A[R, V], edited in place."""


class Sample(Protocol):
    def __call__(self, logits: torch.Tensor, rows: SamplingRows) -> SampledRows:
        """A[R, V] -> one token id a row."""

    def truncated(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """A[R, V] -> A[R, V], removed tokens at -infinity: the logits of basis processed."""
