"""The shapes of the kernel benchmark: models, and the batches that stand for workloads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Row counts of the linear stack in a CUDA graph, head included."""

PREFILL_ROWS = (1024, 4096, 8192)
"""Row counts of the linear stack launched one by one, without the head: few rows reach it."""

BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A linear layer, y [rows, n] = x [rows, k] w^T, that a model has ``count`` times."""

    name: str
    k: int
    n: int
    count: int = 1

    @property
    def weight_bytes(self) -> int:
        """Of all of them, in bfloat16."""
        return 2 * self.k * self.n * self.count


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The geometry of a decoder in bfloat16."""

    name: str
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    def projections(self) -> tuple[Projection, ...]:
        q_width = self.q_heads * self.head_dim
        qkv_width = q_width + 2 * self.kv_heads * self.head_dim
        of_layer = (
            ("qkv_proj", self.hidden, qkv_width),
            ("o_proj", q_width, self.hidden),
            ("gate_up_proj", self.hidden, 2 * self.intermediate),
            ("down_proj", self.intermediate, self.hidden),
        )
        return tuple(Projection(name=name, k=k, n=n, count=self.layers) for name, k, n in of_layer)

    def head(self) -> Projection:
        return Projection(name="head", k=self.hidden, n=self.vocabulary)

    @property
    def token_kv_bytes(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * 2 * self.kv_heads * self.head_dim


QWEN3_8B = ModelShape(
    name="Qwen3-8B",
    layers=36,
    hidden=4096,
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=12288,
    vocabulary=151936,
)
QWEN3_06B = ModelShape(
    name="Qwen3-0.6B",
    layers=28,
    hidden=1024,
    q_heads=16,
    kv_heads=8,
    head_dim=128,
    intermediate=3072,
    vocabulary=151936,
)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step of a workload.

    ``queries`` and ``keys`` count each sequence's tokens of this step and all that it sees.
    Sequences in groups of ``group`` share their first ``shared`` keys. ``sampled`` rows reach
    the head; ``top_p`` is the workload's.
    """

    workload: str
    model: ModelShape
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    group: int = 1
    shared: int = 0
    top_p: float = 1.0
    temperature: float = 1.0

    @property
    def tokens(self) -> int:
        return sum(self.queries)

    @property
    def sampled(self) -> int:
        return len(self.queries)

    @property
    def distinct_keys(self) -> int:
        """Keys that are read once where a group's shared ones are read once."""
        repeated = len(self.keys) - -(-len(self.keys) // self.group)
        return sum(self.keys) - repeated * self.shared

    @property
    def scores(self) -> int:
        """Query-key pairs that causal attention computes, of one head."""
        return sum(q * (2 * k - q + 1) // 2 for q, k in zip(self.queries, self.keys, strict=True))

    @property
    def decodes(self) -> bool:
        return self.tokens == len(self.queries)


def batches() -> Iterator[Batch]:
    """The steps that the benchmark times, drawn alike on every machine."""
    rng = Random(0)
    yield _decode("decode1", QWEN3_8B, [256], temperature=0.0)
    yield _decode("decode64", QWEN3_8B, [384] * 64, temperature=0.0)
    yield _decode("64 x 4k", QWEN3_8B, [4096] * 64)
    tail = [rng.randint(3000, 4096) for _ in range(8)]
    yield _decode("rollout4k, tail", QWEN3_8B, tail, top_p=0.95)
    full = [min(150 + int(rng.lognormvariate(6.6, 0.8)), 4096) for _ in range(64)]
    yield _decode("rollout4k", QWEN3_8B, full, top_p=0.95)
    grpo = [1024 + rng.randint(32, 1200) for _ in range(512)]
    yield _decode("grpo", QWEN3_8B, grpo, group=16, shared=1024)
    yield _decode("nano", QWEN3_06B, [rng.randint(100, 2000) for _ in range(256)])
    for workload, sequences, length in (("prefill2k", 4, 2048), ("prefill2k", 8, 2048)):
        yield _prefill(workload, sequences, length)
    yield _prefill("prefill 8k", 1, 8192)


def _decode(
    workload: str,
    model: ModelShape,
    keys: list[int],
    *,
    group: int = 1,
    shared: int = 0,
    top_p: float = 1.0,
    temperature: float = 1.0,
) -> Batch:
    return Batch(
        workload=workload,
        model=model,
        queries=(1,) * len(keys),
        keys=tuple(keys),
        group=group,
        shared=shared,
        top_p=top_p,
        temperature=temperature,
    )


def _prefill(workload: str, sequences: int, length: int) -> Batch:
    lengths = (length,) * sequences
    return Batch(workload=workload, model=QWEN3_8B, queries=lengths, keys=lengths, temperature=0.0)
