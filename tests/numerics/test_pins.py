"""Pins of the environment: set where a switch needs them, refused where they void it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedctl.errors import NumericsRefused
from pagedctl.numerics.envelopes import Envelope, add_nothing, house_envelopes
from pagedctl.numerics.pins import PINS, hold_pins, pins_in_force
from pagedctl.numerics.resolution import Numerics, resolve_numerics
from pagedctl.numerics.switches import Value, switch_named
from tests.conftest import Cli

ENVELOPES = house_envelopes()
PLUGGED = Envelope(name="acme", bitwise=True, promise="acme's", resolve=add_nothing)
BITWISE = (ENVELOPES["invariant"], ENVELOPES["rl-bitwise"], PLUGGED)

ONEDNN = {"ONEDNN_DEFAULT_FPMATH_MODE": "STRICT", "DNNL_DEFAULT_FPMATH_MODE": "STRICT"}
OPENMP = {"OMP_DYNAMIC": "false"}
TORCH = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0"}
NVIDIA = {"NVIDIA_TF32_OVERRIDE": "0"}
NCCL = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_COLLNET_ENABLE": "0"}
SYMMETRIC = {"NCCL_NVLS_ENABLE": "0", "NCCL_WIN_ENABLE": "0"}
PLACES = {
    # device and tp: what a bitwise contract sets in an empty environment
    ("cpu", 1): ONEDNN | OPENMP | TORCH,
    ("cpu", 2): ONEDNN | OPENMP | TORCH,
    ("cuda", 1): TORCH | NVIDIA,
    ("cuda", 2): TORCH | NVIDIA | NCCL | SYMMETRIC,
}
SWITCHES_ALONE: dict[tuple[str, Value], dict[str, str]] = {
    # what one switch sets alone, under fast on two GPUs
    ("deterministic_kernels", True): TORCH | NVIDIA,
    ("deterministic_collectives", True): NCCL,
    ("symmetric_memory", False): SYMMETRIC,
    ("batch_invariant", True): {},
    ("layer_boundary_norm", "unfused"): {},
}

REFUSED = """\
error: the environment variable ONEDNN_DEFAULT_FPMATH_MODE is BF16
where: environment variable ONEDNN_DEFAULT_FPMATH_MODE, switch deterministic_kernels
rule: deterministic_kernels on needs ONEDNN_DEFAULT_FPMATH_MODE STRICT: otherwise oneDNN may \
round the inputs of float32 products
remedy: unset ONEDNN_DEFAULT_FPMATH_MODE
"""
RUN = ("generate", "--prompt", "Tom", "--max-tokens", "2", "--quiet", "--json", "run.json")


def tree(envelope: Envelope, device: str, tp: int, **given: Value) -> Numerics:
    return resolve_numerics(envelope, given, {}).on_device(device, tp=tp)


def test_every_pin_names_a_switch_a_value_of_it_and_a_variable_of_its_own() -> None:
    assert len({one.variable for one in PINS}) == len(PINS)
    assert {one.variable for one in PINS} == set(
        ONEDNN | OPENMP | TORCH | NVIDIA | NCCL | SYMMETRIC
    )
    for one in PINS:
        assert switch_named(one.switch).takes(one.setting)
        assert one.values
        assert one.why


@pytest.mark.parametrize("envelope", BITWISE, ids=lambda one: one.name)
@pytest.mark.parametrize(("device", "tp"), PLACES)
def test_a_bitwise_contract_sets_what_its_switches_need_there(
    envelope: Envelope, device: str, tp: int
) -> None:
    environ = {"PATH": "/bin", "NCCL_DEBUG": "INFO"}
    numerics = tree(envelope, device, tp)
    hold_pins(numerics, environ)
    assert environ == {"PATH": "/bin", "NCCL_DEBUG": "INFO"} | PLACES[device, tp]
    everywhere = dict.fromkeys((one.variable for one in PINS), None)
    assert pins_in_force(numerics, environ) == everywhere | PLACES[device, tp]


@pytest.mark.parametrize(("device", "tp"), PLACES)
def test_fast_touches_and_refuses_nothing(device: str, tp: int) -> None:
    loose = {one.variable: "loose" for one in PINS}
    for environ in ({}, dict(loose)):
        before = dict(environ)
        numerics = tree(ENVELOPES["fast"], device, tp)
        hold_pins(numerics, environ)
        assert environ == before
        assert pins_in_force(numerics, environ) == dict.fromkeys(loose, None)


@pytest.mark.parametrize(("switch", "value"), SWITCHES_ALONE)
def test_a_switch_used_alone_under_fast_has_its_pins(switch: str, value: Value) -> None:
    environ: dict[str, str] = {}
    hold_pins(tree(ENVELOPES["fast"], "cuda", 2, **{switch: value}), environ)
    assert environ == SWITCHES_ALONE[switch, value]


@pytest.mark.parametrize("variable", [one.variable for one in PINS])
def test_an_inherited_value_that_voids_a_switch_is_refused_and_nothing_is_set(
    variable: str,
) -> None:
    (pin,) = (one for one in PINS if one.variable == variable)
    numerics = tree(ENVELOPES["invariant"], pin.devices[0], 2)
    environ = {variable: "other"}
    with pytest.raises(NumericsRefused) as caught:
        hold_pins(numerics, environ)
    assert environ == {variable: "other"}
    state = "off" if pin.setting is False else "on"
    needed = " or ".join(pin.values)
    assert caught.value.lines() == [
        f"error: the environment variable {variable} is other",
        f"where: environment variable {variable}, switch {pin.switch}",
        f"rule: {pin.switch} {state} needs {variable} {needed}: otherwise {pin.why}",
        f"remedy: unset {variable}",
    ]


def test_all_inherited_conflicts_are_refused_together() -> None:
    environ = {one.variable: "other" for one in PINS}
    with pytest.raises(NumericsRefused) as caught:
        hold_pins(tree(ENVELOPES["invariant"], "cuda", 2), environ)
    assert len(caught.value.faults) == len(PLACES["cuda", 2])


@pytest.mark.parametrize("value", ["STRICT", "strict", "Strict", " strict "])
def test_an_inherited_value_that_keeps_the_switch_stays_as_it_is(value: str) -> None:
    environ = {"ONEDNN_DEFAULT_FPMATH_MODE": value}
    numerics = tree(ENVELOPES["invariant"], "cpu", 1)
    hold_pins(numerics, environ)
    assert environ["ONEDNN_DEFAULT_FPMATH_MODE"] == value
    assert pins_in_force(numerics, environ)["ONEDNN_DEFAULT_FPMATH_MODE"] == value


@pytest.mark.parametrize("value", ["true", "TRUE", "1"])
def test_threads_that_follow_the_load_are_refused(value: str) -> None:
    """On two busy cores, 200 equal products of [16, 4096] x [4096, 1024] had three results."""
    numerics = tree(ENVELOPES["invariant"], "cpu", 1)
    with pytest.raises(NumericsRefused, match="OMP_DYNAMIC false or 0"):
        hold_pins(numerics, {"OMP_DYNAMIC": value})
    kept = {"OMP_DYNAMIC": "FALSE"}
    hold_pins(numerics, kept)
    assert kept["OMP_DYNAMIC"] == "FALSE"


def test_an_empty_value_counts_as_not_set() -> None:
    environ = {"ONEDNN_DEFAULT_FPMATH_MODE": ""}
    hold_pins(tree(ENVELOPES["invariant"], "cpu", 1), environ)
    assert environ == PLACES["cpu", 1]


def test_no_pin_is_in_force_before_a_device_is_chosen() -> None:
    numerics = resolve_numerics(ENVELOPES["invariant"], {}, {})
    assert set(pins_in_force(numerics, {one.variable: "0" for one in PINS}).values()) == {None}


def test_a_run_with_an_inherited_conflict_is_refused_under_a_contract_alone(
    cli: Cli, tmp_path: Path
) -> None:
    """oneDNN reads the variable at its first product: float32 inputs may become bfloat16."""
    lowered = {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16", "DNNL_DEFAULT_FPMATH_MODE": ""}
    refused = cli(*RUN, env=lowered)
    assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", REFUSED)
    served = cli(*RUN[:-1], "fast.json", "--numerics", "fast", env=lowered)
    assert (served.returncode, served.stderr) == (0, "")
    pins = json.loads((tmp_path / "fast.json").read_bytes())["numerics"]["pins"]
    assert pins == dict.fromkeys((one.variable for one in PINS), None)


def test_the_manifest_shows_the_pins_that_a_run_set(cli: Cli, tmp_path: Path) -> None:
    unset = dict.fromkeys((one.variable for one in PINS), "")
    assert cli(*RUN, "--unverified", env=unset).returncode == 0
    pins = json.loads((tmp_path / "run.json").read_bytes())["numerics"]["pins"]
    everywhere = dict.fromkeys((one.variable for one in PINS), None)
    assert pins == everywhere | PLACES["cpu", 1]
