"""The cos/sin table of rotary position embedding, in the form that the switches name.

The house's form is float64 on the host. A trainer may compute YaRN in float32 on a device;
its two switches name where the ramp and where the frequencies are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagedctl.models.rope import RopeSpec

HOST = "host"


@dataclass(frozen=True, kw_only=True)
class YarnDevices:
    """Where YaRN is computed: ``host`` in float64; ``cpu`` or ``cuda`` there, in float32.

    ``ramp`` is moved to where ``frequency`` is, and widened or rounded once on the way. Powers,
    divisions, interpolation, angles, cos and sin are computed at ``frequency``.
    """

    ramp: str = HOST
    frequency: str = HOST


def rope_table(
    rope: RopeSpec,
    num_positions: int,
    dtype: torch.dtype,
    *,
    device: torch.device,
    yarn: YarnDevices | None = None,
) -> torch.Tensor:
    """cos and sin of every position, [num_positions, rotary_dim]: the cos half, then the sin half.

    Multiplied by the attention factor where they are computed, and rounded once to *dtype*;
    returned in float32 (float64 for a float64 table), which holds any narrower value exactly. A
    position's bits do not follow *num_positions*. *yarn* (None: all on the host) concerns no
    other rope type.
    """
    devices = yarn if yarn is not None and rope.type == "yarn" else YarnDevices()
    if devices.frequency == HOST:
        table = _host_table(rope, num_positions, devices.ramp)
    else:
        table = _device_table(rope, num_positions, devices)
    internal = torch.float64 if dtype == torch.float64 else torch.float32
    return table.to(dtype).to(internal).to(device)


def _host_table(rope: RopeSpec, num_positions: int, ramp_device: str) -> torch.Tensor:
    """float64; only the ramp of a YaRN may come from elsewhere."""
    ramp = None if ramp_device == HOST else _yarn_ramp(rope, ramp_device).tolist()
    frequencies = np.array(rope.inverse_frequencies(yarn_ramp=ramp), dtype=np.float64)
    angles = np.outer(np.arange(num_positions, dtype=np.float64), frequencies)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * rope.attention_scaling
    return torch.from_numpy(table)


def _device_table(rope: RopeSpec, num_positions: int, devices: YarnDevices) -> torch.Tensor:
    """float32, on the frequency device."""
    positions = torch.arange(num_positions, dtype=torch.float32, device=devices.frequency)
    angles = torch.outer(positions, _yarn_frequencies(rope, devices))
    return torch.cat([angles.cos(), angles.sin()], dim=1) * rope.attention_scaling


def _yarn_frequencies(rope: RopeSpec, devices: YarnDevices) -> torch.Tensor:
    """float32[rotary_dim // 2], in the operations and the order of DeepSeek's YaRN."""
    device = torch.device(devices.frequency)
    pairs = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32, device=device)
    powers = rope.theta ** (pairs / rope.rotary_dim)
    kept, divided = 1.0 / powers, 1.0 / (rope.factor * powers)
    share_kept = 1.0 - _yarn_ramp(rope, devices.ramp).to(device, torch.float32)
    return divided * (1.0 - share_kept) + kept * share_kept


def _yarn_ramp(rope: RopeSpec, device: str) -> torch.Tensor:
    """The linear ramp over the pairs, float64 of the host or float32 of *device*."""
    if device == HOST:
        return torch.tensor(rope.yarn_ramp(), dtype=torch.float64)
    low, high = rope.yarn_ramp_ends()
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float32, device=device)
    return ((pairs - low) / (high - low)).clamp(0.0, 1.0)
