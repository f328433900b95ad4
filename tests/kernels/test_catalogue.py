"""The house's leaves, their orders, and the page that explains them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagedctl_kernels import house, sites
from pagedctl_kernels.catalogue import house_registry
from pagedctl_kernels.leaf import BATCH_INVARIANT, CallSite, Requirement
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops import gumbel_noise
from pagedctl_kernels.order import arithmetic_id
from pagedctl_kernels.registry import NoLeafError

PAGE = Path(__file__).parents[2] / "docs" / "arithmetic.md"
CPU = Machine(kind="cpu", isa="AVX512", library="mkl 1 torch 2", threads=2)
INVARIANT = Requirement(features=frozenset({BATCH_INVARIANT}))


def decoder_sites(dtype: str = "bfloat16", **switches: str) -> list[CallSite]:
    """One site of each op of a small decoder; *switches* as in the page's section 9."""

    def given(*names: str) -> dict[str, str]:
        return {name: switches[name] for name in names if name in switches}

    heads = {"q_heads": 4, "kv_heads": 2, "head_dim": 32, "block_size": 16}
    return [
        sites.embedding_site("embed", vocab_size=512, width=128, dtype=dtype),
        sites.rms_norm_site("norm", width=128, eps=1e-6, dtype=dtype, **given("norm_cast")),
        sites.gemm_site("qkv", k=128, n=256, dtype=dtype, bias=False),
        sites.qk_norm_rope_write_site(
            "rope",
            **heads,
            rotary_dim=32,
            dtype=dtype,
            qk_norm=True,
            eps=1e-6,
            **given("norm_cast", "rope_table_dtype"),
            **given("yarn_ramp_mask_device", "yarn_frequency_device"),
        ),
        sites.attention_site("attention", **heads, dtype=dtype, **given("softmax_p_dtype")),
        sites.silu_mul_site("act", width=352, dtype=dtype, **given("activation_rounding")),
        sites.head_site("head", k=128, n=512, dtype=dtype, **given("head_dtype")),
        sites.block_sumexp_site("sumexp", dtype=dtype),
        sites.logprob_site("logprob", dtype=dtype, **given("form", "temperature_form")),
        sites.logit_edits_site("edits", dtype=dtype),
        sites.sample_site("sample", dtype=dtype, **given("temperature_form")),
    ]


def identity(all_sites: list[CallSite], machine: Machine = CPU) -> str:
    registry = house_registry()
    return arithmetic_id(registry.select(s, machine, INVARIANT).order for s in all_sites)


def test_importing_the_catalogue_the_sites_and_the_interfaces_imports_no_torch() -> None:
    code = (
        "import sys, pagedctl_kernels.catalogue as c, pagedctl_kernels.sites, "
        "pagedctl_kernels.ops.interfaces; c.house_registry(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": "kernels:."})


def test_every_op_has_a_batch_invariant_cpu_leaf_in_every_dtype() -> None:
    assert len(house_registry().ops()) == 11
    for dtype in sites.DTYPES:
        for site in decoder_sites(dtype):
            selection = house_registry().select(site, CPU, INVARIANT)
            assert selection.order.device_class == "cpu"


def test_every_leaf_takes_its_order_from_the_house() -> None:
    known = {*house.TABLE, *house.OTHER_ORDERS}
    assert all(leaf.order in known for leaf in house_registry().leaves())


@pytest.mark.parametrize("op", ["gemm", "head"])
def test_packed_products_are_first_and_the_library_serves_fast_alone(op: str) -> None:
    site = next(one for one in decoder_sites("float32") if one.op == op)
    registry = house_registry()
    assert registry.select(site, CPU, INVARIANT).leaf.name == f"torch.{op}_packed"
    assert registry.select(site, CPU, Requirement()).leaf.name == f"torch.{op}_packed"
    wide = next(one for one in decoder_sites("float64") if one.op == op)
    assert registry.select(wide, CPU, INVARIANT).leaf.name == f"torch.{op}_row_blocks"
    assert registry.select(wide, CPU, Requirement()).leaf.name == f"torch.{op}_library"
    named = Requirement(names=(f"torch.{op}_library",), features=INVARIANT.features)
    with pytest.raises(NoLeafError, match="does not declare batch_invariant"):
        registry.select(site, CPU, named)


def test_bfloat16_projections_without_a_bias_stay_in_bfloat16() -> None:
    def chosen(dtype: str, bias: bool) -> str:
        site = sites.gemm_site("proj", k=128, n=64, dtype=dtype, bias=bias)
        return house_registry().select(site, CPU, INVARIANT).leaf.name

    assert chosen("bfloat16", False) == "torch.gemm_packed_bfloat16"
    assert chosen("bfloat16", True) == "torch.gemm_row_blocks"
    assert chosen("float16", False) == "torch.gemm_packed"


def test_arithmetic_id_is_independent_of_fusion_layers_and_output_width() -> None:
    base = decoder_sites()
    fused = [sites.gemm_site(name, k=128, n=64, dtype="bfloat16", bias=False) for name in "qkv"]
    assert identity(base) == identity([*base, *fused]) == identity(base * 3)


def test_arithmetic_id_depends_on_contraction_length_dtype_and_machine() -> None:
    base = decoder_sites()
    longer = [sites.gemm_site("down", k=352, n=128, dtype="bfloat16", bias=False)]
    other = Machine(kind="cpu", isa="AVX2", library="mkl 1 torch 2", threads=2)
    one_thread = Machine(kind="cpu", isa="AVX512", library="mkl 1 torch 2", threads=1)
    ids = [
        identity(base),
        identity(base + longer),
        identity(decoder_sites("float16")),
        identity(base, other),
        identity(base, one_thread),
    ]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("switch", "value"),
    [
        ("rope_table_dtype", "model"),
        ("yarn_ramp_mask_device", "cpu"),
        ("yarn_frequency_device", "cpu"),
        ("yarn_frequency_device", "cuda"),
        ("norm_cast", "after"),
        ("activation_rounding", "float32"),
        ("softmax_p_dtype", "float32"),
        ("head_dtype", "float32"),
        ("temperature_form", "multiply"),
        ("form", "blockwise"),
    ],
)
def test_every_switch_of_the_page_changes_the_arithmetic_id(switch: str, value: str) -> None:
    assert identity(decoder_sites()) != identity(decoder_sites(**{switch: value}))


def test_a_switch_that_changes_nothing_in_float32_keeps_the_arithmetic_id() -> None:
    for switch in ("activation_rounding", "softmax_p_dtype", "head_dtype"):
        plain = identity(decoder_sites("float32"))
        assert plain == identity(decoder_sites("float32", **{switch: "float32"}))


def test_site_builders_refuse_what_has_no_order() -> None:
    with pytest.raises(ValueError, match="dtype 'int8' is not one of float32"):
        sites.gemm_site("x", k=1, n=1, dtype="int8", bias=False)
    with pytest.raises(ValueError, match="norm_cast 'during' is not one of before, after"):
        sites.rms_norm_site("x", width=8, eps=1e-6, dtype="float32", norm_cast="during")
    with pytest.raises(ValueError, match="yarn_ramp_mask_device 'gpu' is not one of host, cpu"):
        decoder_sites(yarn_ramp_mask_device="gpu")
    with pytest.raises(ValueError, match="q_heads 3 is not a multiple of kv_heads 2"):
        sites.attention_site("x", q_heads=3, kv_heads=2, head_dim=8, block_size=16, dtype="float32")


def page_constants(label: str) -> tuple[float, ...]:
    """The constants that follow ``Q:`` or ``P:`` on the page."""
    text = PAGE.read_text(encoding="utf-8")
    block = re.search(rf"^    {label}: ((?:[-\d.\s]+|\(lowest power first\))+)", text, re.M)
    assert block is not None
    return tuple(map(float, re.findall(r"-?\d+\.\d+", block.group(1))))


def test_the_noise_constants_equal_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page_constants("Q") == gumbel_noise.EXPONENTIAL
    assert page_constants("P") == gumbel_noise.LOGARITHM
    assert "fl(e * -2.12194440e-4)" in text
    assert gumbel_noise.LN2_LOW == -2.12194440e-4
    assert f"fl(e * {gumbel_noise.LN2_HIGH})" in text
    assert f"0x{gumbel_noise._SQRT_HALF_BITS:08x}" in text
    assert f"if v < {gumbel_noise.SERIES_BELOW}" in text


def test_the_tiling_constants_equal_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert f"splits of {house.SPLIT_TOKENS} keys aligned to position 0" in text
    assert f"tiles of {house.TILE_KEYS} keys" in text
    assert f"W = {house.LOGPROB_BLOCK} unless stated" in text
    assert f"blocks of {house.CPU_ROW_BLOCK} rows" in text
