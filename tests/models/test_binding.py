"""Binding under chosen leaves: one leaf for all sites of an op, and reasons for every refusal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pagedctl.errors import NumericsRefused
from pagedctl.models.binding import DecoderPlans, bind_plans
from pagedctl.models.resolve import spec_from_config
from pagedctl.models.spec import ModelSpec
from pagedctl.numerics.envelopes import house_envelopes
from pagedctl.numerics.resolution import resolve_numerics
from pagedctl_kernels.catalogue import house_registry
from pagedctl_kernels.leaf import Limit
from pagedctl_kernels.machine import this_machine
from pagedctl_kernels.ops.torch_checks import has_bfloat16_products
from pagedctl_kernels.registry import Registry
from tests.reference.tiny_models import tiny_model

LIBRARY = {"gemm": ("torch.gemm_library",)}
GEMM_SITES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def spec_of(family: str, dtype: str = "float32", **changes: Any) -> ModelSpec:
    config = tiny_model(family, **changes).config
    raw = {key: value for key, value in config.items() if key != "windows_by_layer"}
    return spec_from_config(raw, dtype=dtype)


def bound(
    spec: ModelSpec,
    *,
    numerics: str = "invariant",
    leaves: Mapping[str, tuple[str, ...]] | None = None,
    registry: Registry | None = None,
) -> DecoderPlans:
    return bind_plans(
        spec,
        resolve_numerics(house_envelopes()[numerics], {}, {}),
        block_size=16,
        kv_dtype=spec.dtype,
        machine=this_machine("cpu"),
        registry=registry or house_registry(),
        leaves=leaves,
    )


def gemm_leaves(plans: DecoderPlans) -> set[str]:
    return {getattr(plans, name).leaf.name for name in GEMM_SITES}


@pytest.mark.parametrize("name", ["torch.gemm_row_blocks", "torch.gemm_per_row"])
def test_a_chosen_leaf_serves_every_site_of_its_op_and_no_other_op(name: str) -> None:
    spec = spec_of("qwen3")
    plain, chosen = bound(spec), bound(spec, leaves={"gemm": (name,)})
    assert gemm_leaves(chosen) == {name}
    others = {site: leaf for site, leaf in plain.leaves().items() if not site.startswith("gemm")}
    assert others.items() <= chosen.leaves().items()
    assert chosen.arithmetic_id != plain.arithmetic_id


def test_a_leaf_without_batch_invariance_is_refused_by_a_contract_and_served_by_fast() -> None:
    spec = spec_of("qwen3")
    assert gemm_leaves(bound(spec, numerics="fast", leaves=LIBRARY)) == set(*LIBRARY.values())
    for contract in house_envelopes().bitwise_names():
        with pytest.raises(NumericsRefused) as caught:
            bound(spec, numerics=contract, leaves=LIBRARY)
        faults = caught.value.faults
        assert [one.where for one in faults] == [f"call site {name}" for name in GEMM_SITES]
        for fault in faults:
            told = dict(line.strip().split(" ", 1) for line in fault.what.splitlines()[1:])
            assert set(told) == {leaf.name for leaf in house_registry().leaves("gemm")}
            assert told.pop("torch.gemm_library").endswith(
                "refused: does not declare batch_invariant"
            )
            left_out = "not among the requested leaves (torch.gemm_library)"
            assert all(left_out in standing for standing in told.values())
            assert contract in fault.rule
            assert fault.remedy.startswith("drop --leaf gemm; or ")


def test_a_refusal_without_a_chosen_leaf_speaks_of_none() -> None:
    only = Registry([one for one in house_registry().leaves() if one.op != "silu_mul"])
    with pytest.raises(NumericsRefused) as caught:
        bound(spec_of("qwen3"), registry=only)
    assert "--leaf" not in caught.value.remedy
    assert "no leaf of op silu_mul is registered" in caught.value.what


@pytest.mark.skipif(not has_bfloat16_products(), reason="this CPU multiplies no bfloat16")
def test_a_leaf_unfit_at_one_site_gives_way_at_all_of_them_within_the_choice() -> None:
    """qwen2 has biases in qkv alone, which the bfloat16 leaf does not take."""
    spec = spec_of("qwen2", "bfloat16")
    native, blocks = "torch.gemm_packed_bfloat16", "torch.gemm_row_blocks"
    assert gemm_leaves(bound(spec_of("qwen3", "bfloat16"))) == {native}
    assert gemm_leaves(bound(spec, leaves={"gemm": (native, blocks)})) == {blocks}
    assert gemm_leaves(bound(spec, leaves={"gemm": (native, "torch.gemm_per_row")})) == {
        "torch.gemm_per_row"
    }
    with pytest.raises(NumericsRefused) as caught:
        bound(spec, leaves={"gemm": (native,)})
    (fault,) = caught.value.faults
    assert fault.where == "call site qkv_proj"
    assert f"{native} (priority 30): refused: bias True is not one of False" in fault.what
    assert f"not among the requested leaves ({native})" in fault.what


def test_two_leaves_that_are_unfit_at_one_site_each_give_way_to_a_third() -> None:
    """Neither of them may serve its own site alone, and the model is served all the same."""
    spec = spec_of("qwen3")
    widths = {"first": spec.hidden_size, "second": 2 * spec.intermediate_size}
    spare = next(leaf for leaf in house_registry().leaves("gemm") if leaf.name.endswith("per_row"))
    narrow = [
        replace(
            spare,
            name=f"plug.{name}",
            limits=(*spare.limits, Limit(fact="n", allowed=tuple(other_widths(spec, width)))),
            priority=priority,
        )
        for priority, (name, width) in zip((99, 98), widths.items(), strict=True)
    ]
    registry = house_registry().with_leaves(narrow)
    assert gemm_leaves(bound(spec, registry=registry)) == gemm_leaves(bound(spec))
    chosen = tuple(leaf.name for leaf in narrow)
    assert gemm_leaves(
        bound(spec, registry=registry, leaves={"gemm": (*chosen, "torch.gemm_per_row")})
    ) == {"torch.gemm_per_row"}
    with pytest.raises(NumericsRefused, match="call site "):
        bound(spec, registry=registry, leaves={"gemm": chosen})


def other_widths(spec: ModelSpec, without: int) -> set[int]:
    """The output widths of the model's projections but for one."""
    rows = (spec.q_size + 2 * spec.kv_size, spec.hidden_size, 2 * spec.intermediate_size)
    return set(rows) - {without}


def test_layers_with_and_without_a_window_are_served_by_one_attention_leaf() -> None:
    leaves = house_registry().leaves("attention")
    (house,) = [one for one in leaves if one.capability.kind == "cpu"]
    whole = replace(
        house,
        name="plug.attention_without_windows",
        limits=(*house.limits, Limit(fact="window", allowed=(None,))),
        priority=99,
    )
    registry = house_registry().with_leaves([whole])
    mixed = spec_of("qwen3")
    assert set(mixed.windows) == {None, 9}
    for spec, name in ((mixed, house.name), (spec_of("llama"), whole.name)):
        plans = bound(spec, registry=registry)
        assert {one.leaf.name for one in plans.attention.values()} == {name}
        assert set(plans.attention) == set(spec.windows)
