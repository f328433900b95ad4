"""The engine broken at one selection point after the other: what a proof of invariance must see.

Each mutant patches the product itself, says which case of the proof concerns it and whom the
proof should suspect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from pagedctl.engine import completions
from pagedctl.engine.batch_rows import BatchRows
from pagedctl.engine.edit_rows import EditRows
from pagedctl.engine.prefix_sharing import PrefixSharing
from pagedctl.engine.sampler import Sampler
from pagedctl.models.decoder import Decoder
from pagedctl_kernels.ops import linear
from pagedctl_kernels.ops.attention import torch_reference as attention
from pagedctl_kernels.ops.attention.torch_reference import TorchAttention
from pagedctl_kernels.ops.embedding.torch_reference import TorchEmbedding
from pagedctl_kernels.ops.logprob.torch_reference import TorchLogprob
from pagedctl_kernels.ops.qk_norm_rope_write import torch_reference as rope
from pagedctl_kernels.ops.rms_norm import torch_reference as rms_norm
from pagedctl_kernels.ops.sample import truncation
from pagedctl_kernels.ops.silu_mul.torch_reference import TorchSiluMul
from tests.verify import mutations
from tests.verify.mutations import Replace
from tests.verify.op_mutants import Reached


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """``replacement`` stands in place of ``where.name``.

    ``case`` of the proof exposes it; ``suspects`` are the ops of which one must be named.
    ``points`` are the lines of the checklist that it concerns.
    """

    where: Any
    name: str
    replacement: Replace
    case: str
    suspects: tuple[str, ...]
    points: tuple[str, ...]

    def put(self, patch: pytest.MonkeyPatch) -> Reached:
        reached = Reached()
        original = getattr(self.where, self.name)
        patch.setattr(self.where, self.name, self.replacement(original, reached))
        return reached


def product(site: str, op: str, k: int, n: int) -> Mutant:
    return Mutant(
        where=linear._WidenedLinear,
        name="__call__",
        replacement=mutations.changed_if(mutations.product_of(op, k, n), mutations.moved),
        case="packed",
        suspects=(op,),
        points=(f"GEMM tactic of {site} {k}x{n}",),
    )


def batch(change: Any, case: str, suspect: str, *points: str) -> Mutant:
    return Mutant(
        where=BatchRows,
        name="step_batch",
        replacement=mutations.on_batch(change),
        case=case,
        suspects=(suspect,),
        points=points,
    )


def op_by_rows(where: Any, op: str, *points: str) -> Mutant:
    return Mutant(
        where=where,
        name="__call__",
        replacement=mutations.changed_if(mutations.many_rows),
        case="packed",
        suspects=(op,),
        points=points,
    )


EMBEDDED_PRODUCTS = (
    ("qkv_proj", "gemm", 128, 256),
    ("o_proj", "gemm", 128, 128),
    ("gate_up_proj", "gemm", 128, 576),
    ("down_proj", "gemm", 288, 128),
    ("lm_head", "head", 128, 512),
)
"""The call sites of the embedded model: name, op, K, N."""

OTHERS = "embedding, RoPE and activation"
REFUSED = frozenset({"TF32 and narrowed float32", "threads of a product"})
"""Lines of the checklist that have no mutant: a process whose settings drift runs no step."""

HERE_AND_THERE = frozenset({"seeds of another process"})
"""Mutants that only a comparison of two processes sees."""

MUTANTS = {
    **{f"another {site} for many rows": product(site, *rest) for site, *rest in EMBEDDED_PRODUCTS},
    "a tactic that changes in time": Mutant(
        where=linear._WidenedLinear,
        name="__call__",
        replacement=mutations.tuned(*EMBEDDED_PRODUCTS[1][1:]),
        case="repeat",
        suspects=("gemm", "engine"),
        points=("autotune",),
    ),
    "KV splits by the live batch": Mutant(
        where=attention,
        name="build_work",
        replacement=mutations.splits_by_live_batch,
        case="packed",
        suspects=("attention",),
        points=("attention split",),
    ),
    "attention library by the live batch": Mutant(
        where=TorchAttention,
        name="_part_states",
        replacement=mutations.attention_changed(mutations.of_many_units),
        case="packed",
        suspects=("attention",),
        points=("attention library by batch size",),
    ),
    "an attention path for several tokens": Mutant(
        where=TorchAttention,
        name="_part_states",
        replacement=mutations.attention_changed(mutations.of_several_tokens),
        case="rescore",
        suspects=("attention",),
        points=("attention path",),
    ),
    "a norm in the library's order": Mutant(
        where=rms_norm,
        name="rms_normalise",
        replacement=mutations.sum_of_the_library,
        case="packed",
        suspects=("rms_norm",),
        points=("norm configuration by width",),
    ),
    "an activation by rows": op_by_rows(TorchSiluMul, "silu_mul", OTHERS),
    "an embedding by rows": op_by_rows(TorchEmbedding, "embedding", OTHERS),
    "rows behind the cut": Mutant(
        where=Decoder,
        name="_mlp",
        replacement=mutations.second_part_moved,
        case="chunks",
        suspects=("rms_norm", "gemm"),
        points=("rows of a batch cut for the cache",),
    ),
    "positions that restart at a chunk": batch(
        mutations.restart_at_a_chunk, "chunks", "engine", "chunk boundary"
    ),
    "positions behind a preemption": batch(
        mutations.one_behind_after_preemption, "preemption", "engine", "preemption and recompute"
    ),
    "another's block": batch(
        mutations.block_of_another, "pools", "attention", "pool size and placement of blocks"
    ),
    "prefix blocks in another order": Mutant(
        where=PrefixSharing,
        name="look_up",
        replacement=mutations.shifted_by_one,
        case="prefix",
        suspects=("attention",),
        points=("prefix-reuse boundary",),
    ),
    "a key that is narrowed in a decode": Mutant(
        where=rope,
        name="write_cache",
        replacement=mutations.rounded_as_a_decode,
        case="rescore",
        suspects=("qk_norm_rope_write",),
        points=("KV dtype",),
    ),
    "a token that comes too late": Mutant(
        where=BatchRows,
        name="store",
        replacement=mutations.nothing_stored,
        case="packed",
        suspects=("engine",),
        points=("lag of the host",),
    ),
    "noise keyed by the step": batch(
        mutations.keyed_by_step, "packed", "engine", "random stream of a request"
    ),
    "noise keyed by the row": batch(
        mutations.keyed_by_row, "packed", "engine", "admission order and resident rows"
    ),
    "seeds that count the requests": Mutant(
        where=completions,
        name="derive_seed",
        replacement=mutations.counted_seed,
        case="sampled",
        suspects=("engine",),
        points=("RNG of unseeded requests",),
    ),
    "truncation to one token in a full batch": Mutant(
        where=truncation,
        name="_prefix_mask",
        replacement=mutations.one_kept,
        case="sampled",
        suspects=("sample",),
        points=("truncation and ties",),
    ),
    "penalties that grow in a batch": Mutant(
        where=EditRows,
        name="step_edits",
        replacement=mutations.harder_in_a_batch,
        case="sampled",
        suspects=("logit_edits",),
        points=("penalties and bias",),
    ),
    "given tokens scored in another order": Mutant(
        where=Sampler,
        name="_score",
        replacement=mutations.of_the_library,
        case="rescore",
        suspects=("logprob", "engine"),
        points=("logprob path: sampled, prompt, likeliest",),
    ),
    "a logprob by rows": Mutant(
        where=TorchLogprob,
        name="__call__",
        replacement=mutations.changed_if(mutations.many_rows),
        case="packed",
        suspects=("logprob",),
        points=("logprob order",),
    ),
    "seeds of another process": Mutant(
        where=completions,
        name="sample_seed",
        replacement=mutations.seed_of_the_run,
        case="process",
        suspects=("engine",),
        points=("process: hash seeds, addresses, order of imports",),
    ),
}
