"""Which bound leaf computes which stage of a position. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from pagedctl.models.binding import DecoderPlans
from pagedctl.verify.trace import StageLeaf
from pagedctl_kernels.plan import Plan


def stage_leaves(
    plans: DecoderPlans, windows: tuple[int | None, ...]
) -> dict[tuple[int | None, str], StageLeaf]:
    """The leaf of every stage that an op computes."""
    found = dict(_layer_leaves(plans, windows))
    outside = {
        "embedding": plans.embedding,
        "final_norm": plans.norm,
        "head": plans.head,
        "logit_edits": plans.logit_edits,
        "sample": plans.sample,
        "reported": plans.sample,
        "likeliest": plans.logprob,
        "block_sumexp": plans.block_sumexp,
        "logprob": plans.logprob,
    }
    found |= {(None, stage): plan for stage, plan in outside.items()}
    return {
        place: StageLeaf(op=plan.site.op, site=plan.site.name, leaf=plan.leaf.name)
        for place, plan in found.items()
    }


def _layer_leaves(
    plans: DecoderPlans, windows: tuple[int | None, ...]
) -> Iterator[tuple[tuple[int | None, str], Plan]]:
    for layer, window in enumerate(windows):
        attention = plans.attention[window]
        yield (layer, "attention"), attention
        yield (layer, "blocks"), attention
        for stage in ("input_norm", "post_attention_norm"):
            yield (layer, stage), plans.norm
        for stage in ("qkv_proj", "qk_norm_rope_write", "o_proj"):
            yield (layer, stage), getattr(plans, stage)
        for stage in ("gate_up_proj", "silu_mul", "down_proj"):
            yield (layer, stage), getattr(plans, stage)
