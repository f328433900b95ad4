"""The machine that a plan is selected for: data, plus the one function that reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Static facts of one compute device.

    ``kind`` is ``cpu`` or ``cuda``. ``capability`` is the CUDA compute capability as
    ``(major, minor)``, and None on a CPU. ``isa`` is the vector instruction set that torch
    uses, ``library`` the CPU's BLAS, ``threads`` the intra-op thread count; they are
    arithmetic facts on a CPU, where a BLAS picks its summation order by them.
    """

    kind: str
    capability: tuple[int, int] | None = None
    isa: str = ""
    library: str = ""
    threads: int = 0

    @property
    def device_class(self) -> str:
        """The column of the arithmetic table: ``cpu``, or for example ``sm_90``."""
        if self.capability is None:
            return self.kind
        major, minor = self.capability
        return f"sm_{major}{minor}"

    def facts(self) -> Mapping[str, object]:
        """The placeholders that an order template may use."""
        return {"isa": self.isa, "library": self.library, "threads": self.threads}


def this_machine(device: str) -> Machine:
    """Read the facts of ``cpu`` or ``cuda`` (the current device); imports torch."""
    import torch

    if device == "cuda":
        return Machine(kind="cuda", capability=torch.cuda.get_device_capability())
    return Machine(
        kind="cpu",
        isa=torch.backends.cpu.get_cpu_capability(),
        library=_blas_library(),
        threads=torch.get_num_threads(),
    )


def _blas_library() -> str:
    """Name and version of the BLAS behind torch's fp32 and fp64 products."""
    import torch

    for line in torch.__config__.show().splitlines():
        if "Math Kernel Library Version" in line:
            version = line.split("Version", 1)[1].split()[0]
            return f"mkl {version} torch {torch.__version__.split('+')[0]}"
    return f"torch {torch.__version__.split('+')[0]}"
