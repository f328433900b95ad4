"""Each planted fault is a real leaf that a small alone-against-packed run catches on any model."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedctl.verify.invariance import request_maker
from pagedctl.verify.planted_faults import PlantedFault, planted_faults
from pagedctl.verify.power_check import try_fault
from pagedctl_kernels.catalogue import house_registry
from pagedctl_kernels.leaf import BATCH_INVARIANT, DETERMINISTIC, Capability, LeafSpec, Requirement
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.order import OrderTemplate
from pagedctl_kernels.sites import DTYPES, gemm_site
from tests.reference.tiny_models import FAMILIES, VOCAB, TinyModel, tiny_model
from tests.verify.power_harness import alone_against_packed, engine_over, requests

FAULTS = {fault.name: fault for fault in planted_faults(house_registry())}
GEMM, HEAD, SAMPLE, LOGPROB = FAULTS

SMALLEST = {
    "hidden_size": 2,
    "intermediate_size": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 5,
    "attention_bias": False,
    "mlp_bias": False,
}
SUBJECTS: dict[str, tuple[TinyModel | None, int, str]] = {
    **{f"{family} float32": (tiny_model(family), VOCAB, "float32") for family in FAMILIES},
    **{f"qwen3 {dtype}": (tiny_model("qwen3"), VOCAB, dtype) for dtype in DTYPES[1:]},
    "embedded": (None, 512, "bfloat16"),
}


def test_there_are_faults_of_products_of_sampling_and_of_logprobs() -> None:
    assert [fault.op for fault in FAULTS.values()] == ["gemm", "head", "sample", "logprob"]


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_sound_engine_gives_equal_bits(tmp_path: Path, subject: str) -> None:
    model, vocab, dtype = SUBJECTS[subject]
    with engine_over(model, tmp_path, dtype=dtype) as engine:
        found = alone_against_packed(engine, requests(5, vocab, tokens=8))
    assert (found.other_ids, found.other_logprobs) == (0, 0)


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_planted_fault_shows(tmp_path: Path, subject: str, name: str) -> None:
    """vllm-project/vllm#51187: a wrong logprob order leaves every token id as it was."""
    model, vocab, dtype = SUBJECTS[subject]
    with engine_over(model, tmp_path, dtype=dtype, registry=FAULTS[name].registry) as engine:
        found = alone_against_packed(engine, requests(5, vocab, tokens=8))
    if name == SAMPLE:
        assert found.other_ids > 0
    else:
        assert found.other_ids + found.other_logprobs > 0
    if name == LOGPROB:
        assert found.other_ids == 0
        assert found.other_logprobs == 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_shows_in_a_model_of_two_columns(
    tmp_path: Path, name: str, dtype: str
) -> None:
    model, fault = tiny_model("llama", **SMALLEST), FAULTS[name]
    with engine_over(model, tmp_path, dtype=dtype, registry=fault.registry) as engine:
        found = alone_against_packed(engine, requests(48, 5), probes=6)
    assert found.other_ids + found.other_logprobs > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAULTS)
def test_most_requests_of_the_power_run_show_a_fault(tmp_path: Path, name: str, dtype: str) -> None:
    """On the embedded model, which is sure of its word problems; in a run of a few tokens."""
    with engine_over(None, tmp_path, dtype=dtype) as engine:
        found = try_fault(FAULTS[name], engine.config, request_maker(engine, max_tokens=4))
    assert found.measured is not None
    assert found.measured.requests_differing > found.measured.requests // 2
    assert (found.measured.requests_differing_in_tokens > 0) == (name == SAMPLE)


def bound_leaves(folder: Path, fault: PlantedFault) -> dict[str, set[str]]:
    """Op to the leaves that serve it."""
    leaves: dict[str, set[str]] = {}
    with engine_over(tiny_model("qwen3"), folder, registry=fault.registry) as engine:
        for plan in engine.parts.plans.all():
            leaves.setdefault(plan.site.op, set()).add(plan.leaf.name)
    return leaves


@pytest.mark.parametrize("name", FAULTS)
def test_the_registry_selects_the_faulty_leaf_at_every_site_of_its_op_and_nowhere_else(
    tmp_path: Path, name: str
) -> None:
    fault = FAULTS[name]
    leaves = bound_leaves(tmp_path, fault)
    assert leaves[fault.op] == {f"planted.{name}.cpu"}
    others = set().union(*(names for op, names in leaves.items() if op != fault.op))
    assert not any(one.startswith("planted.") for one in others)


def test_each_fault_has_an_arithmetic_of_its_own(tmp_path: Path) -> None:
    identities = set()
    for place, registry in enumerate((None, *(one.registry for one in FAULTS.values()))):
        folder = tmp_path / str(place)
        with engine_over(tiny_model("qwen3"), folder, registry=registry) as engine:
            identities.add(engine.parts.plans.arithmetic_id)
    assert len(identities) == 1 + len(FAULTS)


def test_a_leaf_option_does_not_keep_the_fault_out(tmp_path: Path) -> None:
    chosen = ("gemm=torch.gemm_per_row", "head=torch.head_per_row")
    with engine_over(tiny_model("qwen3"), tmp_path, leaf=chosen) as engine:
        config = engine.config
    assert FAULTS[GEMM].config_for(config).leaf == ("head=torch.head_per_row",)
    assert FAULTS[SAMPLE].config_for(config) is config


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fault_is_planted_for_every_device_class_that_has_leaves_of_the_op(dtype: str) -> None:
    other = LeafSpec(
        name="other.gemm",
        op="gemm",
        entry="nowhere:build",
        formats=house_registry().leaves("gemm")[0].formats,
        capability=Capability(kind="cuda"),
        order=OrderTemplate(op="gemm", device_class="sm_90", terms=(("chain", "{k}"),)),
        features=frozenset({BATCH_INVARIANT, DETERMINISTIC}),
        priority=99,
    )
    fault, *_ = planted_faults(house_registry().with_leaves([other]))
    site = gemm_site("o_proj", k=2, n=3, dtype=dtype, bias=True)
    asked = Requirement(features=frozenset({BATCH_INVARIANT, DETERMINISTIC}))
    for machine in (Machine(kind="cpu"), Machine(kind="cuda", capability=(9, 0))):
        chosen = fault.registry.select(site, machine, asked)
        assert chosen.leaf.name == f"planted.{GEMM}.{machine.device_class}"
        assert "planted fault" in dict(chosen.order.terms)["segments"]
