"""A decoder's weights, by the names of a checkpoint: prepared once, replaced in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pagedctl.errors import Fault, ModelError
from pagedctl.models.binding import DecoderPlans
from pagedctl.models.spec import ModelSpec
from pagedctl_kernels.ops.interfaces import PreparedLinear

Weights = Mapping[str, torch.Tensor]

VECTORS: Mapping[str, str] = {
    "input_norm": "input_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
}
"""A layer's weights that are read as they are: field of LayerWeights to module."""

PROJECTIONS: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}
"""A layer's linear weights: field, and plan, to the modules whose rows it stacks."""


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One layer's weights, linear ones as their leaves prepared them."""

    input_norm: torch.Tensor
    qkv_proj: PreparedLinear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o_proj: PreparedLinear
    post_attention_norm: torch.Tensor
    gate_up_proj: PreparedLinear
    down_proj: PreparedLinear


def prepare_layer(plans: DecoderPlans, weights: Weights, layer: int) -> LayerWeights:
    """The weights of layer number *layer*, prepared by the leaves of *plans*."""
    at = f"model.layers.{layer}"
    vectors = {field: weights.get(f"{at}.{module}.weight") for field, module in VECTORS.items()}
    linear = {
        field: getattr(plans, field).run.prepare(*_fused(weights, at, modules))
        for field, modules in PROJECTIONS.items()
    }
    return LayerWeights(**vectors, **linear)  # type: ignore[arg-type]


def refresh_layer(plans: DecoderPlans, held: LayerWeights, weights: Weights, layer: int) -> None:
    """Put the weights of layer number *layer* into the tensors that *held* has."""
    at = f"model.layers.{layer}"
    for field, module in VECTORS.items():
        vector = getattr(held, field)
        if vector is not None:
            vector.copy_(weights[f"{at}.{module}.weight"])
    for field, modules in PROJECTIONS.items():
        plan, prepared = getattr(plans, field), getattr(held, field)
        weight, bias = _fused(weights, at, modules)
        device = held.input_norm.device
        plan.run.refresh(prepared, weight.to(device), None if bias is None else bias.to(device))


def _fused(
    weights: Weights, at: str, modules: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The modules' weights stacked by output row, and their biases if they have any."""
    weight = torch.cat([weights[f"{at}.{module}.weight"] for module in modules])
    biases = [weights.get(f"{at}.{module}.bias") for module in modules]
    present = [bias for bias in biases if bias is not None]
    return weight, torch.cat(present) if present else None


def require_tensors(spec: ModelSpec, weights: Weights, *, where: str) -> None:
    """Raise ModelError with every tensor that is missing, unknown, or of another form."""
    shapes = {tensor.name: tensor.shape for tensor in spec.tensors}
    faults = []
    for name in sorted({*shapes, *weights}):
        wanted = f"{spec.dtype} {list(shapes[name])}" if name in shapes else "not in the model"
        given = _form(weights[name]) if name in weights else "missing"
        if given != wanted:
            faults.append(
                Fault(
                    what=f"{name} is {given}",
                    where=where,
                    rule=f"{name} is {wanted}; exactly the tensors of {spec.name} are given",
                    remedy="give every tensor by its Hugging Face name, in the model's dtype",
                )
            )
    if faults:
        raise ModelError.of(faults)


def _form(tensor: torch.Tensor) -> str:
    """As in ``float32 [48, 96]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
