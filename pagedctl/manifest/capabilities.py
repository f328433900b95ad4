"""What works on this machine and what does not, why, and what to do about it.

Nothing imports torch or triton before a function here is called.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from pagedctl.manifest.hardware import CpuInfo, DeviceSurvey

OLDEST_TRITON = (3, 6)


@dataclass(frozen=True, kw_only=True)
class Capability:
    """One thing that works here or does not; ``remedy`` is None where nothing need be done."""

    name: str
    works: bool
    detail: str
    remedy: str | None = None


def import_torch() -> tuple[ModuleType | None, Capability]:
    """torch, if it can be imported. A broken installation may raise anything at all."""
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        detail = f"import torch failed: {type(error).__name__}: {error}"
        return None, Capability(
            name="torch", works=False, detail=detail, remedy="install torch >= 2.11"
        )
    return torch, Capability(name="torch", works=True, detail=str(torch.__version__))


def of_torch(
    torch: ModuleType | None, survey: DeviceSurvey, cpu: CpuInfo
) -> tuple[Capability, ...]:
    """What torch can do here; each answer comes from trying it."""
    checks: dict[str, Callable[[ModuleType], Capability]] = {
        "cuda": lambda module: _cuda(module, survey),
        "cpu_gemm_fp32": _cpu_gemm,
        "cpu_capability": _cpu_capability,
        "cpu_threads": lambda module: _cpu_threads(module, cpu),
        "gloo": _gloo,
        "nccl": lambda module: _nccl(module, survey),
    }
    if torch is None:
        return tuple(
            Capability(name=name, works=False, detail="needs torch", remedy="see torch")
            for name in checks
        )
    return tuple(_tried(name, check, torch) for name, check in checks.items())


def _tried(name: str, check: Callable[[ModuleType], Capability], torch: ModuleType) -> Capability:
    """*check*'s answer; one broken part must not hide the others."""
    try:
        return check(torch)
    except Exception as error:
        return Capability(name=name, works=False, detail=f"{type(error).__name__}: {error}")


def _cuda(torch: ModuleType, survey: DeviceSurvey) -> Capability:
    """Whether a kernel really runs: ``is_available()`` alone also holds for unsupported GPUs."""
    gpu_build = "install a CUDA build of torch" if survey.devices else None
    if torch.version.cuda is None:
        detail = f"torch {torch.__version__} is a build without CUDA"
        return Capability(name="cuda", works=False, detail=detail, remedy=gpu_build)
    if not torch.cuda.is_available():
        detail = survey.reason or f"torch (CUDA {torch.version.cuda}) cannot use the driver"
        remedy = f"use a driver for CUDA {torch.version.cuda} or newer" if survey.driver else None
        return Capability(name="cuda", works=False, detail=detail, remedy=remedy)
    total = torch.ones(64, device="cuda").sum().item()
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Capability(name="cuda", works=total == 64.0, detail=", ".join(names))


def _cpu_gemm(torch: ModuleType) -> Capability:
    """The library behind fp32 products on the CPU: it decides their bits."""
    product = torch.ones(16, 16) @ torch.ones(16, 16)
    config = torch.__config__.show()
    blas = re.search(r"BLAS_INFO=(\w+)", config)
    version = re.search(r"(Math Kernel Library Version [\w.]+|OpenBLAS [\w.]+)", config)
    parts = [blas.group(1) if blas else "unnamed BLAS"]
    if version:
        parts.append(version.group(1))
    parts.append("oneDNN" if torch.backends.mkldnn.is_available() else "no oneDNN")
    exact = bool((product == 16.0).all())
    return Capability(name="cpu_gemm_fp32", works=exact, detail=", ".join(parts))


def _cpu_capability(torch: ModuleType) -> Capability:
    """The instruction set that torch's own CPU kernels use (ATEN_CPU_CAPABILITY lowers it)."""
    detail = str(torch.backends.cpu.get_cpu_capability())
    return Capability(name="cpu_capability", works=True, detail=detail)


def _cpu_threads(torch: ModuleType, cpu: CpuInfo) -> Capability:
    """More threads than cores this process may use slow every step down."""
    threads = int(torch.get_num_threads())
    usable = cpu.cores_usable
    if cpu.cores_quota is not None:
        usable = max(1, min(usable, math.floor(cpu.cores_quota)))
    fits = threads <= usable
    return Capability(
        name="cpu_threads",
        works=fits,
        detail=f"{threads} threads on {usable} usable cores",
        remedy=None if fits else f"set OMP_NUM_THREADS={usable}",
    )


def _gloo(torch: ModuleType) -> Capability:
    works = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    detail = "ranks on the CPU" if works else "torch was built without gloo: no --tp on the CPU"
    return Capability(name="gloo", works=bool(works), detail=detail)


def _nccl(torch: ModuleType, survey: DeviceSurvey) -> Capability:
    works = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    if works:
        version = ".".join(map(str, torch.cuda.nccl.version()))
        return Capability(name="nccl", works=True, detail=version)
    return Capability(
        name="nccl",
        works=False,
        detail="torch was built without NCCL: no --tp on GPUs",
        remedy="install a CUDA build of torch" if survey.devices else None,
    )


def of_packages() -> tuple[Capability, ...]:
    """Packages that only some commands need."""
    return (_triton(), _hf_extra())


def _triton() -> Capability:
    try:
        version = str(importlib.import_module("triton").__version__)
    except Exception as error:
        detail = f"import triton failed: {type(error).__name__}: {error}"
        return Capability(
            name="triton", works=False, detail=detail, remedy="install triton >= 3.6 (Linux)"
        )
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < OLDEST_TRITON:
        return Capability(
            name="triton",
            works=False,
            detail=f"{version} is too old",
            remedy="install triton >= 3.6",
        )
    return Capability(name="triton", works=True, detail=version)


def _hf_extra() -> Capability:
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return Capability(
            name="hf",
            works=False,
            detail="transformers is not installed: no reference for parity",
            remedy="pip install 'pagedctl[hf]'",
        )
    return Capability(name="hf", works=True, detail=f"transformers {version}")


def nvml(survey: DeviceSurvey) -> Capability:
    """The driver's own interface: device names and memory without torch."""
    if survey.reason is not None:
        return Capability(name="nvml", works=False, detail=survey.reason)
    count = len(survey.devices)
    return Capability(name="nvml", works=True, detail=f"driver {survey.driver}, {count} GPUs")


def home_writable(home: Path) -> Capability:
    """Whether records and digests can be kept in *home*, without making it."""
    existing = next(path for path in (home, *home.parents) if path.exists())
    works = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    state = "" if existing == home else " (made when first needed)"
    return Capability(
        name="home",
        works=works,
        detail=f"{home}{state}" if works else f"{existing} is not a writable folder",
        remedy=None if works else "set PAGEDCTL_HOME to a folder that you may write",
    )
