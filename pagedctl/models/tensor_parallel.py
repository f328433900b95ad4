"""Which part of each tensor a rank holds (row layout), and what must divide for that.

Query heads, kv heads and the intermediate width are split evenly. With more ranks than kv
heads each kv head is held by tp / kv_heads neighbouring ranks. The vocabulary is split into
ceil(V / tp) rows a rank, the last ranks padded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedctl.errors import Fault, ModelError
from pagedctl.models.architecture import TensorSpec

if TYPE_CHECKING:
    from pagedctl.models.spec import ModelSpec

VOCABULARY_ROLES = frozenset({"embed_tokens", "lm_head"})
KV_ROLES = frozenset({"k_proj", "v_proj"})


def tp_faults(spec: ModelSpec, tp: int) -> tuple[Fault, ...]:
    """Every reason why *spec* cannot be split over *tp* ranks; empty if it can."""
    if tp < 1:
        rule, remedy = "tp >= 1", "use a positive number of ranks"
        return (Fault(what=f"tp is {tp}", where=f"model {spec.name}", rule=rule, remedy=remedy),)
    faults = [
        _tp_fault(spec, tp, key, size, f"tp divides {key}")
        for key, size in (
            ("num_attention_heads", spec.num_attention_heads),
            ("intermediate_size", spec.intermediate_size),
        )
        if size % tp
    ]
    kv_heads = spec.num_key_value_heads
    if kv_heads % tp and tp % kv_heads:
        rule = "tp divides num_key_value_heads, or is a multiple of it (kv heads replicated)"
        faults.append(_tp_fault(spec, tp, "num_key_value_heads", kv_heads, rule))
    return tuple(faults)


def _tp_fault(spec: ModelSpec, tp: int, key: str, size: int, rule: str) -> Fault:
    return Fault(
        what=f"{key} {size} cannot be split over {tp} ranks",
        where=f"model {spec.name}, tp {tp}",
        rule=rule,
        remedy=f"use a tp that fits, for example {_largest_tp_below(spec, tp)}",
    )


def _largest_tp_below(spec: ModelSpec, tp: int) -> int:
    return next(smaller for smaller in range(tp - 1, 0, -1) if _splits(spec, smaller))


def _splits(spec: ModelSpec, tp: int) -> bool:
    kv_heads = spec.num_key_value_heads
    even = spec.num_attention_heads % tp == 0 and spec.intermediate_size % tp == 0
    return even and (kv_heads % tp == 0 or tp % kv_heads == 0)


def require_tp(spec: ModelSpec, tp: int) -> None:
    """Raise :class:`ModelError` with every violated rule if *tp* does not fit."""
    faults = tp_faults(spec, tp)
    if faults:
        raise ModelError.of(faults)


def local_kv_heads(spec: ModelSpec, tp: int) -> int:
    """kv heads that one rank holds."""
    return max(spec.num_key_value_heads // tp, 1)


def shard_bounds(spec: ModelSpec, tensor: TensorSpec, *, tp: int, rank: int) -> tuple[int, int]:
    """[start, stop) of the rank's part on the split axis (axis 0 if replicated).

    Vocabulary rows are real rows only: the last ranks may hold fewer, or none.
    """
    if not 0 <= rank < tp:
        raise ValueError(f"rank {rank} is not in [0, {tp})")
    size = tensor.shape[1] if tensor.shard == "columns" else tensor.shape[0]
    if tensor.shard == "replicated":
        return 0, size
    if tensor.role in VOCABULARY_ROLES:
        rows = _ceil_div(size, tp)
        return min(rank * rows, size), min((rank + 1) * rows, size)
    if tensor.role in KV_ROLES:
        width = local_kv_heads(spec, tp) * spec.head_dim
        first_head = rank * spec.num_key_value_heads // tp
        return first_head * spec.head_dim, first_head * spec.head_dim + width
    return rank * (size // tp), (rank + 1) * (size // tp)


def local_shape(spec: ModelSpec, tensor: TensorSpec, tp: int) -> tuple[int, ...]:
    """The shape that every rank allocates; vocabulary rows padded to ceil(V / tp)."""
    if tensor.shard == "replicated":
        return tensor.shape
    if tensor.role in VOCABULARY_ROLES:
        return (_ceil_div(tensor.shape[0], tp), *tensor.shape[1:])
    start, stop = shard_bounds(spec, tensor, tp=tp, rank=0)
    if tensor.shard == "columns":
        return (tensor.shape[0], stop - start)
    return (stop - start, *tensor.shape[1:])


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)
