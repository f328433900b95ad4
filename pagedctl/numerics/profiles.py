"""Shipped profiles: what the package's own tests prove of a contract. Data, no torch.

A profile covers one family in one dtype on one class of device, with the house's leaves, on one
rank, without graphs. ``tests/engine/test_profiles.py`` proves each of them, and each value of a
switch that they cover.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pagedctl.numerics.combination import Combination
from pagedctl.numerics.logprob_order import parse_logprob_order
from pagedctl.numerics.switches import FIXED, Value, spelled


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A family in a dtype on a device class, e.g. qwen3 bfloat16 cpu, for one contract."""

    family: str
    dtype: str
    device_class: str
    contract: str

    def __str__(self) -> str:
        return f"profile {self.family} {self.dtype} {self.device_class}"


FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
DTYPES = ("float32", "bfloat16", "float16", "float64")

PROFILES: tuple[Profile, ...] = tuple(
    Profile(family=family, dtype=dtype, device_class="cpu", contract="invariant")
    for family in FAMILIES
    for dtype in DTYPES
)

NARROWER_KV: Mapping[str, tuple[str, ...]] = {"float32": ("bfloat16",)}
"""Dtypes of keys and values beside the model's own, by the model's dtype."""

PROVED: Mapping[str, tuple[Value, ...]] = {
    "deterministic_kernels": (True,),
    "batch_invariant": (True,),
    "deterministic_collectives": (True,),
    "symmetric_memory": (False,),
    "topology_invariant": (False,),
    "layer_boundary_norm": ("unfused",),
    "rope_table_dtype": ("float32", "model"),
    "norm_cast": ("before", "after"),
    "activation_rounding": ("model", "float32"),
    "softmax_p_dtype": ("model", "float32"),
    "head_dtype": ("model", "float32"),
    "yarn_ramp_mask_device": ("host", "cpu"),
    "yarn_frequency_device": ("host", "cpu"),
    "logprob_basis": ("scaled", "raw", "processed"),
    "temperature_form": ("divide", "multiply"),
    **{name: (value,) for name, value in FIXED.items()},
}
"""The values of each switch that the profiles cover. Orders are in PROVED_FORMS."""

PROVED_FORMS = ("torch", "blockwise", "blockwise-direct")
"""Logprob orders that the profiles cover, in blocks of any width and any padded vocabulary."""


def profile_of(found: Combination) -> Profile:
    """The profile that would cover *found*, whether it is shipped or not."""
    return Profile(
        family=found.family,
        dtype=found.dtype,
        device_class=found.device.device_class,
        contract=found.contract,
    )


def profile_refusals(found: Combination) -> tuple[str, ...]:
    """Why no profile covers *found*; empty if one does."""
    return tuple(_refusals(found))


def _refusals(found: Combination) -> Iterator[str]:
    profile = profile_of(found)
    if profile not in PROFILES:
        yield f"{profile} is not shipped for {found.contract}"
        return
    for op, leaf in found.outside_leaves:
        yield f"{profile} covers the house's leaves, and op {op} is served by {leaf}"
    if found.layout.tp != 1:
        yield f"{profile} covers one rank, and tp is {found.layout.tp}"
    if found.graphs:
        yield f"{profile} covers runs without graphs"
    if found.kv_dtype not in (found.dtype, *NARROWER_KV.get(found.dtype, ())):
        yield f"{profile} does not cover kv_dtype {found.kv_dtype}"
    for switch, value in found.switches.items():
        if not _is_proved(switch, value):
            yield f"{profile} does not cover {switch} {spelled(value)}"


def _is_proved(switch: str, value: object) -> bool:
    if switch == "logprob_order":
        return parse_logprob_order(str(value)).form in PROVED_FORMS
    if switch == "padded_vocab_size":
        return True
    return value in PROVED.get(switch, ())
