"""What works here and what does not: tried, explained, and never an exception."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from pagedctl.manifest import capabilities, strict_json
from pagedctl.manifest.environment import inspect_environment
from pagedctl.manifest.hardware import CpuInfo, DeviceSurvey
from pagedctl.manifest.schema import DeviceInfo

NO_GPU = DeviceSurvey(devices=(), driver=None, driver_cuda=None, reason="no driver here")


def by_name(found: tuple[capabilities.Capability, ...]) -> dict[str, capabilities.Capability]:
    return {each.name: each for each in found}


def test_the_report_agrees_with_torch_and_is_strict_json(tmp_path: Path) -> None:
    import torch

    report = inspect_environment(environ={"OMP_NUM_THREADS": "2", "HF_TOKEN": "x"}, home=tmp_path)
    found = by_name(report.capabilities)
    assert set(found) == {
        "torch", "cuda", "cpu_gemm_fp32", "cpu_capability", "cpu_threads", "gloo", "nccl", "triton",
        "hf", "nvml", "home",
    }  # fmt: skip
    assert found["torch"].works
    assert found["torch"].detail == torch.__version__
    assert found["cuda"].works == torch.cuda.is_available()
    assert found["cpu_gemm_fp32"].works
    assert found["cpu_capability"].detail == torch.backends.cpu.get_cpu_capability()
    assert found["gloo"].works == torch.distributed.is_gloo_available()
    assert found["home"].works
    data = strict_json.dumps(report.to_json_object())
    read = json.loads(data)
    assert list(read) == [
        "tool",
        "versions",
        "devices",
        "env",
        "cpu",
        "capabilities",
        "driver_cuda",
    ]
    assert read["env"] == {"OMP_NUM_THREADS": "2"}
    assert all(each["detail"] for each in read["capabilities"])


def test_a_torch_that_cannot_be_imported_is_reported_not_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    report = inspect_environment(environ={})
    found = by_name(report.capabilities)
    assert not found["torch"].works
    assert "import torch failed" in found["torch"].detail
    assert found["torch"].remedy
    for name in ("cuda", "cpu_gemm_fp32", "gloo", "nccl"):
        assert not found[name].works
    assert found["hf"].works
    assert report.facts.versions["torch"], "installed, though broken"


def cpu_with(cores: int, quota: float | None) -> CpuInfo:
    return CpuInfo(
        name="c",
        architecture="x86_64",
        isa_flags=(),
        isa_flags_reason=None,
        cores_logical=64,
        cores_usable=cores,
        cores_quota=quota,
        memory_total_bytes=None,
    )


def fake_torch(**parts: object) -> types.ModuleType:
    torch = types.ModuleType("torch")
    for name, value in parts.items():
        setattr(torch, name, value)
    return torch


@pytest.mark.parametrize(
    ("threads", "cores", "quota", "works"),
    [(2, 2, None, True), (8, 2, None, False), (8, 64, 4.0, False), (1, 2, 0.5, True)],
)
def test_more_threads_than_cores_are_said_with_the_remedy(
    threads: int, cores: int, quota: float | None, works: bool
) -> None:
    torch = fake_torch(get_num_threads=lambda: threads)
    found = by_name(capabilities.of_torch(torch, NO_GPU, cpu_with(cores, quota)))["cpu_threads"]
    assert found.works is works
    assert (found.remedy is None) is works


def test_a_gpu_that_torch_cannot_use_is_told_apart_from_no_gpu() -> None:
    with_gpu = DeviceSurvey(
        devices=(DeviceInfo(rank=0, name="H200", capability="9.0", memory_total_bytes=1),),
        driver="580.65",
        driver_cuda="13.0",
        reason=None,
    )
    cpu_build = fake_torch(__version__="2.13.0+cpu", version=types.SimpleNamespace(cuda=None))
    too_new = fake_torch(
        version=types.SimpleNamespace(cuda="14.0"),
        cuda=types.SimpleNamespace(is_available=lambda: False),
    )
    cpu = cpu_with(2, None)
    assert by_name(capabilities.of_torch(cpu_build, NO_GPU, cpu))["cuda"].remedy is None
    found = by_name(capabilities.of_torch(cpu_build, with_gpu, cpu))["cuda"]
    assert found.remedy == "install a CUDA build of torch"
    found = by_name(capabilities.of_torch(too_new, with_gpu, cpu))["cuda"]
    assert found.remedy == "use a driver for CUDA 14.0 or newer"
    assert by_name(capabilities.of_torch(too_new, NO_GPU, cpu))["cuda"].detail == "no driver here"


def test_a_gpu_that_is_available_but_runs_no_kernel_does_not_work() -> None:
    def no_kernel(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel image is available for execution on the device")

    torch = fake_torch(
        version=types.SimpleNamespace(cuda="13.0"),
        cuda=types.SimpleNamespace(is_available=lambda: True),
        ones=no_kernel,
    )
    found = by_name(capabilities.of_torch(torch, NO_GPU, cpu_with(1, None)))["cuda"]
    assert not found.works
    assert "no kernel image" in found.detail


@pytest.mark.parametrize(
    ("version", "works"), [("3.6.0", True), ("3.10.1", True), ("3.5.1", False)]
)
def test_triton_is_compared_by_number(
    monkeypatch: pytest.MonkeyPatch, version: str, works: bool
) -> None:
    triton: Any = types.ModuleType("triton")
    triton.__version__ = version
    monkeypatch.setitem(sys.modules, "triton", triton)
    assert by_name(capabilities.of_packages())["triton"].works is works


def test_home_is_looked_at_and_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "a" / "b"
    assert capabilities.home_writable(home).works
    assert not home.exists()
    (tmp_path / "a").write_text("a file in the way")
    blocked = capabilities.home_writable(home)
    assert not blocked.works
    assert "PAGEDCTL_HOME" in (blocked.remedy or "")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert not capabilities.home_writable(tmp_path).works
