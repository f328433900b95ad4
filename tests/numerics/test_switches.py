"""The tree of switches: contracts tighten, keep what is tight, refuse what is looser."""

from __future__ import annotations

import pytest

from pagedctl.config.engine_config import engine_options
from pagedctl.errors import NumericsRefused
from pagedctl.numerics.envelopes import house_envelopes
from pagedctl.numerics.resolution import Numerics, resolve_numerics
from pagedctl.numerics.switches import FIXED, SWITCHES, Value

ENVELOPES = house_envelopes()
BITWISE = ENVELOPES.bitwise_names()
GOVERNED: dict[str, Value] = {
    "deterministic_kernels": True,
    "batch_invariant": True,
    "deterministic_collectives": True,
    "symmetric_memory": False,
    "layer_boundary_norm": "unfused",
}


def resolve(contract: str, **given: Value) -> Numerics:
    return resolve_numerics(ENVELOPES[contract], given, dict.fromkeys(given, "flag"))


def test_every_switch_is_an_option_and_has_no_value_before_resolution() -> None:
    options = engine_options()
    for one in SWITCHES:
        assert options[one.name].default is None


@pytest.mark.parametrize("contract", BITWISE)
@pytest.mark.parametrize("switch", GOVERNED)
def test_a_bitwise_contract_folds_every_switch_it_governs(contract: str, switch: str) -> None:
    setting = resolve(contract).settings[switch]
    assert (setting.value, setting.set_by) == (GOVERNED[switch], "contract")


@pytest.mark.parametrize("contract", BITWISE)
@pytest.mark.parametrize(
    ("switch", "loose"),
    [
        ("deterministic_kernels", False),
        ("batch_invariant", False),
        ("deterministic_collectives", False),
        ("symmetric_memory", True),
        ("layer_boundary_norm", "fused"),
    ],
)
def test_a_looser_value_is_refused_by_name_value_and_rule(
    contract: str, switch: str, loose: Value
) -> None:
    with pytest.raises(NumericsRefused) as caught:
        resolve(contract, **{switch: loose})
    (fault,) = caught.value.faults
    assert fault.what.startswith(f"{switch} ")
    assert contract in fault.rule
    assert fault.where == f"switch {switch}, set by flag"
    assert resolve("fast", **{switch: loose})[switch] == loose


@pytest.mark.parametrize("contract", ENVELOPES.names())
@pytest.mark.parametrize(
    ("switch", "value"),
    [
        ("logprob_order", "blockwise-16384"),
        ("norm_cast", "after"),
        ("head_dtype", "float32"),
        ("temperature_form", "multiply"),
        ("rope_table_dtype", "model"),
    ],
)
def test_an_equally_tight_choice_is_kept(contract: str, switch: str, value: Value) -> None:
    setting = resolve(contract, **{switch: value}).settings[switch]
    assert (setting.value, setting.set_by) == (value, "flag")


def test_every_switch_is_usable_alone_without_a_contract() -> None:
    for name, tight in GOVERNED.items():
        assert resolve("fast", **{name: tight})[name] == tight


def test_a_topology_contract_needs_a_bitwise_one() -> None:
    with pytest.raises(NumericsRefused, match="topology_invariant"):
        resolve("fast", topology_invariant=True)
    assert resolve("invariant", topology_invariant=True)["topology_invariant"]


def test_streams_and_ties_are_fixed_in_every_contract() -> None:
    for contract in ENVELOPES.names():
        tree = resolve(contract)
        assert {name: tree[name] for name in FIXED} == dict(FIXED)
        assert all(tree.settings[name].set_by == "always" for name in FIXED)
