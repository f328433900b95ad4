"""Ahead-of-time builds of the Triton kernels as data: what is compiled, and within which limits.

Each op lists, in its ``builds.py``, the forms in which its kernels are launched at the shapes that
matter. They compile for a GPU without one, so contraction, registers and spills are checked where
there is none. Reading them imports neither torch nor triton.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field

CAPABILITIES = (80, 90)
"""The compute capabilities that every kernel compiles for."""

Constant = int | float | str | bool | None


@dataclass(frozen=True, kw_only=True)
class Build:
    """One form of one kernel.

    ``kernel`` is ``module:function``. ``signature`` gives the type of each run-time argument in
    Triton's spelling (``*bf16``, ``i32``, ``fp32``); ``:16`` behind it says that the pointer or
    number is a multiple of 16. ``constants`` holds every ``tl.constexpr`` argument; a text such as
    ``tl.bfloat16`` stands for the Triton dtype. ``options`` are launch options (``num_warps``,
    ``num_stages``, ``enable_fp_fusion``). A build breaks its limits above ``registers`` a thread,
    above ``spills`` bytes of local memory a thread, or if a multiply-add is in it that
    ``written_fma`` does not announce (IEEE float32 dots are such, and the compiler's own
    logarithms).
    """

    kernel: str
    label: str
    signature: Mapping[str, str]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    options: Mapping[str, int | bool] = field(default_factory=dict)
    registers: int
    spills: int = 0
    written_fma: bool = False
    capabilities: tuple[int, ...] = CAPABILITIES

    def __str__(self) -> str:
        return f"{self.kernel.partition(':')[2]} ({self.label})"


def house_builds() -> Mapping[str, tuple[Build, ...]]:
    """The builds of every op that has any, by the name of its folder."""
    package = importlib.import_module("pagedctl_kernels.ops")
    found: dict[str, tuple[Build, ...]] = {}
    for module in pkgutil.iter_modules(package.__path__):
        name = f"{package.__name__}.{module.name}.builds"
        if module.ispkg and importlib.util.find_spec(name) is not None:
            found[module.name] = importlib.import_module(name).BUILDS
    return found
