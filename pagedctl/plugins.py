"""The names that a plug-in is written with; importing them loads no torch.

A module that an entry point of the group ``pagedctl.plugins`` names is imported while the
options of the command line are being defined, so it imports nothing else of pagedctl at its
top. What needs torch belongs into the module of a leaf's ``entry``, which is imported when the
leaf is bound. ``docs/plugins.md`` is the page about them.
"""

from __future__ import annotations

from pagedctl.errors import Fault
from pagedctl.numerics.envelopes import CheckpointFacts, Envelope, keep_alignment
from pagedctl.numerics.plugins import Plugin
from pagedctl.numerics.resolution import Choices, Numerics
from pagedctl_kernels.leaf import (
    BATCH_INVARIANT,
    CUDA_GRAPH,
    DETERMINISTIC,
    CallSite,
    Capability,
    Format,
    LeafSpec,
    Limit,
    formats,
)
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.order import OrderTemplate

__all__ = [
    "BATCH_INVARIANT",
    "CUDA_GRAPH",
    "DETERMINISTIC",
    "CallSite",
    "Capability",
    "CheckpointFacts",
    "Choices",
    "Envelope",
    "Fault",
    "Format",
    "LeafSpec",
    "Limit",
    "Machine",
    "Numerics",
    "OrderTemplate",
    "Plugin",
    "formats",
    "keep_alignment",
]
