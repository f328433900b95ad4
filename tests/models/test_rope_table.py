"""The cos/sin table: right in every form, a position's bits its own, YaRN's switches for YaRN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pagedctl.models.resolve import spec_from_config
from pagedctl.models.rope import RopeSpec
from pagedctl.models.rope_table import YarnDevices, rope_table

ConfigOf = Callable[..., dict[str, Any]]
Float32 = np.float32

CPU = torch.device("cpu")
EPS = float(np.finfo(Float32).eps)
POSITIONS = 700
HEAD_DIM = 64

YARN: dict[str, dict[str, Any]] = {
    "plain": {"factor": 4.0, "original_max_position_embeddings": 128},
    "long": {"factor": 40.0, "original_max_position_embeddings": 4096},
    "smooth": {"factor": 6.5, "original_max_position_embeddings": 512, "truncate": False},
    "betas": {"factor": 3.0, "original_max_position_embeddings": 100, "beta_fast": 20},
    "mscale": {
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.707,
        "mscale_all_dim": 1.3,
    },
    "partial": {
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "partial_rotary_factor": 0.375,
    },
}
OTHERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 32,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 8192,
    },
}
FORMS = [YarnDevices(ramp=r, frequency=f) for r in ("host", "cpu") for f in ("host", "cpu")]


def yarn_rope(config_of: ConfigOf, case: str) -> RopeSpec:
    block = {"rope_type": "yarn", **YARN[case]}
    return spec_from_config(config_of(head_dim=HEAD_DIM, rope_scaling=block)).rope


def table(
    rope: RopeSpec,
    devices: YarnDevices | None,
    dtype: torch.dtype = torch.float32,
    positions: int = POSITIONS,
) -> torch.Tensor:
    return rope_table(rope, positions, dtype, device=CPU, yarn=devices)


def ramp_ends(rope: RopeSpec) -> tuple[float, float]:
    """The correction range of DeepSeek's modelling code."""

    def dimension(rotations: float) -> float:
        assert rope.original_max_position_embeddings is not None
        turns = math.log(rope.original_max_position_embeddings / (rotations * 2 * math.pi))
        return (rope.rotary_dim * turns) / (2 * math.log(rope.theta))

    assert rope.beta_fast is not None
    assert rope.beta_slow is not None
    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    return (low, high + 0.001) if low == high else (low, high)


def numpy_ramp(rope: RopeSpec) -> NDArray[Float32]:
    low, high = ramp_ends(rope)
    pairs = np.arange(rope.rotary_dim // 2, dtype=Float32)
    return np.clip((pairs - Float32(low)) / Float32(high - low), Float32(0), Float32(1))


def numpy_frequencies(rope: RopeSpec) -> NDArray[Float32]:
    """The float32 form, every operation numpy's."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=Float32) / Float32(rope.rotary_dim)
    powers = Float32(rope.theta) ** exponents
    kept, divided = Float32(1) / powers, Float32(1) / (Float32(rope.factor) * powers)
    mask = Float32(1) - numpy_ramp(rope)
    found: NDArray[Float32] = divided * (Float32(1) - mask) + kept * mask
    assert found.dtype == Float32
    return found


def torch_table(rope: RopeSpec) -> torch.Tensor:
    """DeepSeek's cached table in torch, float32 throughout."""
    dim, base = rope.rotary_dim, rope.theta
    low, high = ramp_ends(rope)
    extra = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    inter = 1.0 / (rope.factor * base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    mask = 1.0 - ramp
    inverse = inter * (1 - mask) + extra * mask
    freqs = torch.outer(torch.arange(POSITIONS, dtype=torch.float32), inverse)
    scaling = rope.attention_scaling
    return torch.cat([freqs.cos() * scaling, freqs.sin() * scaling], dim=1)


@pytest.mark.parametrize("case", YARN)
def test_the_device_form_is_a_trainers_bit_for_bit(case: str, config_of: ConfigOf) -> None:
    rope = yarn_rope(config_of, case)
    found = table(rope, YarnDevices(ramp="cpu", frequency="cpu"))
    assert found.dtype == torch.float32
    assert torch.equal(found, torch_table(rope))


@pytest.mark.parametrize("case", YARN)
def test_the_device_form_is_within_ulps_of_numpys_float32(case: str, config_of: ConfigOf) -> None:
    """An angle is off by the frequency's few ulps; cos and sin by no more than the angle."""
    rope = yarn_rope(config_of, case)
    angles = np.outer(np.arange(POSITIONS, dtype=Float32), numpy_frequencies(rope))
    want = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * rope.attention_scaling
    off = np.abs(table(rope, YarnDevices(ramp="cpu", frequency="cpu")).numpy() - want)
    allowed = 4 * EPS * (1 + np.concatenate([angles, angles], axis=1))
    assert (off <= allowed * max(rope.attention_scaling, 1)).all()


@pytest.mark.parametrize("case", YARN)
@pytest.mark.parametrize("devices", FORMS, ids=str)
def test_every_form_is_close_to_float64(
    case: str, devices: YarnDevices, config_of: ConfigOf
) -> None:
    rope = yarn_rope(config_of, case)
    angles = np.outer(np.arange(POSITIONS), rope.inverse_frequencies())
    want = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * rope.attention_scaling
    off = np.abs(table(rope, devices).double().numpy() - want)
    allowed = 8 * EPS * (1 + np.concatenate([angles, angles], axis=1))
    assert (off <= allowed * max(rope.attention_scaling, 1)).all()


def test_mixed_forms_move_the_ramp_and_no_two_forms_are_the_same(config_of: ConfigOf) -> None:
    """A float32 ramp is widened for the host; a float64 ramp is rounded once for a device."""
    rope = yarn_rope(config_of, "smooth")
    tables = [table(rope, one) for one in FORMS]
    for place, one in enumerate(tables):
        assert not any(torch.equal(one, other) for other in tables[place + 1 :])
    wide = numpy_ramp(rope).astype(np.float64)
    base = [rope.theta ** -(2 * pair / rope.rotary_dim) for pair in range(len(wide))]
    inverse = [
        one / rope.factor * share + one * (1 - share) for one, share in zip(base, wide, strict=True)
    ]
    angles = np.outer(np.arange(POSITIONS), inverse)
    want = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * rope.attention_scaling
    mixed = table(rope, YarnDevices(ramp="cpu"), torch.float64)
    assert mixed.dtype == torch.float64
    assert np.allclose(mixed.numpy(), want, rtol=0, atol=1e-12)
    apart = np.abs(table(rope, YarnDevices(), torch.float64).numpy() - want).max()
    assert apart > 1e-10  # the float64 ramp: the comparison would have seen it


@pytest.mark.parametrize("devices", FORMS, ids=str)
@pytest.mark.parametrize("case", ["smooth", "partial"])
def test_a_position_has_its_bits_in_a_table_of_any_length(
    case: str, devices: YarnDevices, config_of: ConfigOf
) -> None:
    rope = yarn_rope(config_of, case)
    whole, before = table(rope, devices), torch.get_num_threads()
    for count in (1, 2, 3, 7, 17, 64, 129, 511):
        assert torch.equal(table(rope, devices, positions=count), whole[:count])
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            long = table(rope, devices, positions=20_000)
            assert torch.equal(long[:POSITIONS], whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("devices", FORMS, ids=str)
def test_a_table_is_rounded_once_to_its_dtype(devices: YarnDevices, config_of: ConfigOf) -> None:
    rope = yarn_rope(config_of, "plain")
    for narrow in (torch.bfloat16, torch.float16):
        rounded = table(rope, devices, narrow)
        assert rounded.dtype == torch.float32
        source = table(rope, devices, torch.float64)
        assert torch.equal(rounded, source.to(narrow).float())
        assert not torch.equal(rounded, source.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", OTHERS)
def test_the_switches_leave_every_other_rope_type_alone(
    case: str, dtype: torch.dtype, config_of: ConfigOf
) -> None:
    block = dict(OTHERS[case])
    rope = spec_from_config(config_of(head_dim=HEAD_DIM, rope_scaling=block)).rope
    plain = table(rope, None, dtype)
    for devices in [*FORMS, YarnDevices(ramp="cuda", frequency="cuda")]:
        assert torch.equal(table(rope, devices, dtype), plain)


@pytest.mark.gpu
@pytest.mark.parametrize("ramp", ["host", "cpu", "cuda"])
def test_frequencies_on_a_gpu_are_close_to_float64(ramp: str, config_of: ConfigOf) -> None:
    rope = yarn_rope(config_of, "smooth")
    angles = np.outer(np.arange(POSITIONS), rope.inverse_frequencies())
    want = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * rope.attention_scaling
    found = table(rope, YarnDevices(ramp=ramp, frequency="cuda"))
    allowed = 8 * EPS * (1 + np.concatenate([angles, angles], axis=1)) * rope.attention_scaling
    assert (np.abs(found.double().numpy() - want) <= allowed).all()
