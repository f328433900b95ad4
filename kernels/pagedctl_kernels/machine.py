"""The machine that a plan is selected for: data, plus the one function that reads it."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Static facts of one compute device.

    ``kind`` is ``cpu`` or ``cuda``. ``capability`` is the CUDA compute capability as
    ``(major, minor)``, and None on a CPU. ``isa`` is the vector instruction set that torch
    uses and ``threads`` the intra-op thread count. ``library`` names what decides orders that
    no source states: on a CPU the BLAS, with a digest of what it computes; on CUDA the kernel
    compiler.
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
        return Machine(
            kind="cuda",
            capability=torch.cuda.get_device_capability(),
            library=f"triton {importlib.metadata.version('triton')}",
        )
    return Machine(
        kind="cpu",
        isa=torch.backends.cpu.get_cpu_capability(),
        library=f"{_blas_library()} probe {_probe_digest()}",
        threads=torch.get_num_threads(),
    )


def settings_drift(machine: Machine) -> str | None:
    """How torch's settings of this process moved away from *machine*, or None; cheap.

    Threads, precision of products and subnormals belong to the whole process, and a library
    that changes them after plans were bound would change bits.
    """
    import torch

    from pagedctl_kernels.ops.torch_checks import settings_that_void_ieee

    if machine.kind != "cpu":
        return None
    if torch.get_num_threads() != machine.threads:
        return f"torch uses {torch.get_num_threads()} threads, the plans are for {machine.threads}"
    return next((setting for setting, _ in settings_that_void_ieee(torch.float32)), None)


def _blas_library() -> str:
    """Name and version of the BLAS behind torch's fp32 and fp64 products."""
    import torch

    release = f"torch {torch.__version__.split('+')[0]}"
    for line in torch.__config__.show().splitlines():
        if "Math Kernel Library Version" in line:
            return f"mkl {line.split('Version', 1)[1].split()[0]} {release}"
    return release


def _probe_digest() -> str:
    """A digest of what this process computes for fixed inputs.

    Versions do not tell which code path a BLAS took (its own dispatch, MKL_CBWR), whether
    float32 products are IEEE ones, or whether subnormals are flushed; the bits do.
    """
    import torch

    steps = torch.arange(16 * 576, dtype=torch.float64).reshape(16, 576)
    digest = hashlib.sha256()
    for dtype in (torch.float32, torch.float64):
        x = torch.sin(steps * 0.37).to(dtype)
        tiny = torch.full((16,), torch.finfo(dtype).tiny, dtype=dtype) / 8
        products = (x @ torch.cos(steps * 0.11).to(dtype).T, x.exp(), (x + 2).log(), tiny * 1)
        for one in products:
            digest.update(one.contiguous().numpy().tobytes())
    for dtype in (torch.float32, torch.bfloat16):
        digest.update(_packed_probe(torch.sin(steps * 0.37).to(dtype)))
    return digest.hexdigest()[:8]


def _packed_probe(x: torch.Tensor) -> bytes:
    """oneDNN's product of x [16, K] with itself, from packed weights; empty where it has none."""
    from pagedctl_kernels.ops.row_blocks import has_packed_products, packed_product, packed_weight

    if not has_packed_products(x.dtype):
        return b""
    probe: bytes = packed_product(x, packed_weight(x)).float().numpy().tobytes()
    return probe
