"""What this machine is: its CPU from the operating system, its GPUs from the driver (NVML)."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedctl.manifest.schema import DeviceInfo

# Instruction sets that decide which fp32, bf16 or int8 kernels a CPU library picks.
ISA_FLAGS_OF_INTEREST = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni",
    "avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_bf16", "amx_int8",
    "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "svebf16",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CpuInfo:
    """The CPU. ``cores_logical`` are the machine's, ``cores_usable`` what this process may use.

    ``cores_quota`` is the container's CPU-time limit in cores (cgroup v2), None without one.
    """

    name: str
    architecture: str
    isa_flags: tuple[str, ...] | None
    isa_flags_reason: str | None
    cores_logical: int
    cores_usable: int
    cores_quota: float | None
    memory_total_bytes: int | None

    def as_device(self, *, rank: int, capability: str | None) -> DeviceInfo:
        """The manifest's device of a rank that runs on this CPU."""
        return DeviceInfo(
            rank=rank,
            name=self.name,
            capability=capability,
            memory_total_bytes=self.memory_total_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class DeviceSurvey:
    """The NVIDIA GPUs as the driver names them; without a driver, ``reason`` says why.

    ``DeviceInfo.rank`` is the position among the visible GPUs. ``driver_cuda`` is the newest
    CUDA version that the driver can run, e.g. ``13.0``.
    """

    devices: tuple[DeviceInfo, ...]
    driver: str | None
    driver_cuda: str | None
    reason: str | None


def devices(visible: str | None = None) -> DeviceSurvey:
    """The GPUs that this process may use, without torch and without making a CUDA context.

    *visible* is the value of CUDA_VISIBLE_DEVICES (None: not set), indices or UUID prefixes;
    as in CUDA, the list ends at the first entry that names no GPU. Order is the PCI bus order.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        return _no_devices(f"the NVML binding cannot be imported ({error})")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return _no_devices(f"no usable NVIDIA driver ({error})")
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        chosen = _visible_handles(nvml, handles, visible)
        return DeviceSurvey(
            devices=tuple(_device(nvml, handle, rank) for rank, handle in enumerate(chosen)),
            driver=_text(nvml.nvmlSystemGetDriverVersion()),
            driver_cuda=_cuda_text(nvml.nvmlSystemGetCudaDriverVersion()),
            reason=None if chosen else _why_none(handles, visible),
        )
    except nvml.NVMLError as error:
        return _no_devices(f"the NVIDIA driver did not answer ({error})")
    finally:
        nvml.nvmlShutdown()


def _no_devices(reason: str) -> DeviceSurvey:
    return DeviceSurvey(devices=(), driver=None, driver_cuda=None, reason=reason)


def _why_none(handles: list[Any], visible: str | None) -> str:
    if handles:
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides all {len(handles)} GPUs"
    return "the NVIDIA driver reports no GPU"


def _visible_handles(nvml: Any, handles: list[Any], visible: str | None) -> list[Any]:
    if visible is None:
        return handles
    uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    return [handles[index] for index in visible_indices(visible, uuids)]


def visible_indices(visible: str, uuids: list[str]) -> list[int]:
    """The GPU indices that CUDA_VISIBLE_DEVICES=*visible* leaves, in its order."""
    chosen: list[int] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdecimal():
            matches = [int(entry)] if int(entry) < len(uuids) else []
        else:
            matches = [i for i, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(matches) != 1 or matches[0] in chosen:
            break
        chosen += matches
    return chosen


def _device(nvml: Any, handle: Any, rank: int) -> DeviceInfo:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return DeviceInfo(
        rank=rank,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        capability=f"{major}.{minor}",
        memory_total_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # older bindings gave bytes


def _cuda_text(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def cpu_info(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> CpuInfo:
    """The CPU of this machine, from Linux's own files where there are any."""
    described = _first_processor(proc / "cpuinfo")
    flags = frozenset((described.get("flags") or described.get("Features") or "").split())
    name = described.get("model name") or platform.processor() or platform.machine()
    return CpuInfo(
        name=name,
        architecture=platform.machine(),
        isa_flags=tuple(f for f in ISA_FLAGS_OF_INTEREST if f in flags) if flags else None,
        isa_flags_reason=None if flags else f"{proc / 'cpuinfo'} lists no flags",
        cores_logical=os.cpu_count() or 1,
        cores_usable=_usable_cores(),
        cores_quota=_quota_cores(cgroup / "cpu.max"),
        memory_total_bytes=_memory_total_bytes(),
    )


def _first_processor(path: Path) -> Mapping[str, str]:
    """The first block of /proc/cpuinfo; empty where there is no such file."""
    try:
        block = path.read_text(errors="replace").split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in block.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quota_cores(path: Path) -> float | None:
    """cgroup v2's ``cpu.max`` ("<quota us> <period us>" or "max ...") in cores."""
    try:
        quota_us, period_us = path.read_text().split()
        return int(quota_us) / int(period_us)
    except (OSError, ValueError, ZeroDivisionError):
        return None  # no such file, or "max": no limit


def _memory_total_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
