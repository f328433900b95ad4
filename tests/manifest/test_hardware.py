"""What the driver and the operating system say about this machine, or why they say nothing."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from pagedctl.manifest import hardware
from pagedctl.manifest.hardware import cpu_info, devices


class FakeNvmlError(Exception):
    pass


def fake_nvml(names: list[str], *, failing: str | None = None) -> Any:
    """A driver with GPUs of these names, whose function *failing* answers with an error."""
    nvml: Any = types.ModuleType("pynvml")
    nvml.NVMLError = FakeNvmlError
    nvml.shutdowns = 0

    def shutdown() -> None:
        nvml.shutdowns += 1

    nvml.nvmlInit = lambda: None
    nvml.nvmlShutdown = shutdown
    nvml.nvmlDeviceGetCount = lambda: len(names)
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}{handle}-x"
    nvml.nvmlDeviceGetName = lambda handle: names[handle].encode()
    nvml.nvmlDeviceGetCudaComputeCapability = lambda handle: (9, 0)
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(total=150_754_820_096)
    nvml.nvmlSystemGetDriverVersion = lambda: "580.65"
    nvml.nvmlSystemGetCudaDriverVersion = lambda: 13020

    def fail(*_: object) -> None:
        raise FakeNvmlError("GPU is lost")

    if failing is not None:
        setattr(nvml, failing, fail)
    return nvml


def test_gpus_are_named_with_their_units(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = fake_nvml(["H200", "H200"])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    survey = devices()
    assert [device.to_json_object() for device in survey.devices] == [
        {"rank": r, "name": "H200", "capability": "9.0", "memory_total_bytes": 150_754_820_096}
        for r in (0, 1)
    ]
    assert (survey.driver, survey.driver_cuda, survey.reason) == ("580.65", "13.2", None)
    assert nvml.shutdowns == 1


def test_ranks_follow_the_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(["A", "B", "C"]))
    assert [(d.rank, d.name) for d in devices("2,0").devices] == [(0, "C"), (1, "A")]
    hidden = devices("")
    assert hidden.devices == ()
    assert hidden.reason == "CUDA_VISIBLE_DEVICES='' hides all 3 GPUs"
    assert hidden.driver == "580.65"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0", [0]),
        (" 2 , 1", [2, 1]),
        ("GPU-b", [1]),
        ("GPU-c1,0", [2, 0]),
        ("GPU-", []),
        ("0,7,1", [0]),
        ("-1", []),
        ("1,1,0", [1]),
        ("NoDevFiles", []),
        ("0,,1", [0]),
    ],
)
def test_visible_devices_mean_what_they_mean_to_cuda(visible: str, expected: list[int]) -> None:
    assert hardware.visible_indices(visible, ["GPU-a1", "GPU-b1", "GPU-c1"]) == expected


@pytest.mark.parametrize("failing", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetMemoryInfo"])
def test_a_driver_that_fails_gives_a_reason(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(["A"], failing=failing))
    survey = devices()
    assert survey.devices == ()
    assert survey.reason is not None
    assert "GPU is lost" in survey.reason


def test_a_missing_binding_gives_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "NVML binding" in (devices().reason or "")


def test_the_cpu_is_described_from_linux_files(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: EPYC 9\nflags\t\t: fpu avx2 fma avx512f\n\n"
        "processor\t: 1\nmodel name\t: other\nflags\t\t: fpu\n"
    )
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    cpu = cpu_info(proc=tmp_path, cgroup=tmp_path)
    assert cpu.name == "EPYC 9"
    assert cpu.isa_flags == ("fma", "avx2", "avx512f")
    assert cpu.isa_flags_reason is None
    assert cpu.cores_quota == 1.5
    device = cpu.as_device(rank=1, capability="AVX512")
    assert (device.rank, device.name, device.capability) == (1, "EPYC 9", "AVX512")


def test_an_unknown_cpu_gives_a_reason(tmp_path: Path) -> None:
    cpu = cpu_info(proc=tmp_path, cgroup=tmp_path)
    assert cpu.isa_flags is None
    assert str(tmp_path / "cpuinfo") in (cpu.isa_flags_reason or "")
    assert cpu.name
    assert cpu.cores_usable >= 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_info(proc=tmp_path, cgroup=tmp_path).cores_quota is None
