"""Facts about this installation and machine, each with a reason where it is absent.

Only :func:`inspect_environment` may import torch, inside the call.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from pagedctl import __version__
from pagedctl.manifest import capabilities
from pagedctl.manifest.capabilities import Capability
from pagedctl.manifest.hardware import CpuInfo, DeviceSurvey, cpu_info, devices
from pagedctl.manifest.schema import DeviceInfo, ToolInfo

__all__ = [
    "Capability",
    "EnvironmentReport",
    "RunFacts",
    "cpu_info",
    "devices",
    "inspect_environment",
    "recorded_env",
    "run_facts",
    "tool_info",
    "versions",
]

GIT_TIMEOUT_S = 10.0
PACKAGE_DIR = Path(__file__).resolve().parents[1]

_DISTRIBUTIONS = ("triton", "transformers", "tokenizers", "safetensors", "orjson", "numpy")

_ENV_PREFIXES = (
    "NCCL_", "CUDA_", "TORCH_", "TRITON_", "OMP_", "PAGEDCTL_",
    # What else changes a result's bits or speed: the OpenMP runtimes and BLAS libraries, oneDNN's
    # instruction set, cuBLAS' workspace, torch's allocator.
    "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "ONEDNN_", "DNNL_", "CUBLAS_", "CUBLASLT_", "PYTORCH_",
)  # fmt: skip
_ENV_NAMES = frozenset({"ATEN_CPU_CAPABILITY", "NVIDIA_TF32_OVERRIDE", "HF_HOME"})
_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "AUTH")


# -- the tool ----------------------------------------------------------------------------


def tool_info(package_dir: Path = PACKAGE_DIR) -> ToolInfo:
    """Version, and commit with dirty flag where *package_dir* lies in its own git checkout.

    A package installed into an environment that happens to lie inside some other project's
    checkout must not report that project's commit, so the repository's root has to be the
    package's parent folder. ``dirty`` looks at the packages only: a result file left in the
    checkout does not change the program.
    """
    root = package_dir.parent
    if not (root / ".git").exists():
        return ToolInfo(version=__version__, commit_reason="not run from a git checkout")
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        changes = _git(root, "status", "--porcelain", "--", package_dir.name, "kernels")
    except (OSError, subprocess.SubprocessError) as error:
        return ToolInfo(version=__version__, commit_reason=_git_reason(error))
    return ToolInfo(version=__version__, commit=commit, dirty=bool(changes))


def _git(root: Path, *arguments: str) -> str:
    """git's answer about *root*, whatever GIT_DIR and the like say, and without locks."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    completed = subprocess.run(
        ["git", "-C", str(root), *arguments],
        env=environ | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=GIT_TIMEOUT_S,
        check=True,
    )
    return completed.stdout.strip()


def _git_reason(error: OSError | subprocess.SubprocessError) -> str:
    if isinstance(error, FileNotFoundError):
        return "git is not installed"
    if isinstance(error, subprocess.CalledProcessError):
        lines = str(error.stderr).strip().splitlines()
        return f"git failed: {lines[0] if lines else error.returncode}"
    return f"git failed: {error}"


# -- versions ----------------------------------------------------------------------------


def versions(
    survey: DeviceSurvey | None = None, *, torch: ModuleType | None = None
) -> dict[str, str | None]:
    """Versions of what computes; a null has its reason under ``<name>_reason``.

    torch is not imported: its version file is read as text, because the metadata of a wheel
    lacks the ``+cu130`` of ``torch.__version__``. ``cuda`` is the toolkit torch was built with,
    ``driver`` the NVIDIA driver. ``nccl`` is known only to an imported torch; pass it.
    *survey* saves asking the driver again.
    """
    survey = devices() if survey is None else survey
    of_torch = _torch_build()
    found: dict[str, str | None] = {"python": platform.python_version()}
    _put(found, "torch", of_torch.get("__version__"), "not installed")
    for name in _DISTRIBUTIONS:
        _put(found, name, _distribution_version(name), "not installed")
    _put(found, "cuda", of_torch.get("cuda"), "torch is a build without CUDA, or not installed")
    _put(found, "nccl", *_nccl_version(torch))
    _put(found, "driver", survey.driver, survey.reason or "the driver did not say")
    return found


def _put(found: dict[str, str | None], name: str, value: str | None, reason: str) -> None:
    found[name] = value
    if value is None:
        found[f"{name}_reason"] = reason


def _distribution_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_build() -> dict[str, str]:
    """The string constants of torch/version.py (``__version__``, ``cuda``, ...), unexecuted."""
    try:
        distribution = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return {}
    try:
        source = Path(str(distribution.locate_file("torch/version.py"))).read_text("utf-8")
        return dict(_string_constants(ast.parse(source)))
    except (OSError, SyntaxError, ValueError):  # an unusual build: what the metadata says
        return {"__version__": distribution.version}


def _string_constants(tree: ast.Module) -> list[tuple[str, str]]:
    constants: list[tuple[str, str]] = []
    for node in tree.body:
        if isinstance(node, ast.Assign):
            target: ast.expr = node.targets[0]
        elif isinstance(node, ast.AnnAssign):
            target = node.target
        else:
            continue
        value = node.value
        if (
            isinstance(target, ast.Name)
            and isinstance(value, ast.Constant)
            and isinstance(value.value, str)
        ):
            constants.append((target.id, value.value))
    return constants


def _nccl_version(torch: ModuleType | None) -> tuple[str | None, str]:
    if torch is None:
        return None, "torch was not imported"
    if torch.version.cuda is None:
        return None, "torch is a build without CUDA"
    try:
        return ".".join(map(str, torch.cuda.nccl.version())), ""
    except (AttributeError, RuntimeError) as error:
        return None, f"torch has no NCCL ({error})"


# -- environment variables -----------------------------------------------------------------


def recorded_env(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of *environ* that can change a result, by name.

    NCCL_*, CUDA_*, TORCH_*, TRITON_*, OMP_*, PAGEDCTL_*; also MKL_*, KMP_*, GOMP_*,
    OPENBLAS_*, ONEDNN_*, DNNL_*, CUBLAS_*, CUBLASLT_*, PYTORCH_*, ATEN_CPU_CAPABILITY,
    NVIDIA_TF32_OVERRIDE and HF_HOME. Names that hold keys or tokens, and values that are URLs
    with a password, are left out.
    """
    return {
        name: environ[name]
        for name in sorted(environ)
        if _is_recorded(name) and not _may_be_secret(name, environ[name])
    }


def _is_recorded(name: str) -> bool:
    return name.startswith(_ENV_PREFIXES) or name in _ENV_NAMES


def _may_be_secret(name: str, value: str) -> bool:
    if any(word in name.upper() for word in _SECRET_WORDS):
        return True
    authority = value.partition("://")[2].partition("/")[0]
    return "@" in authority


# -- all of it -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The manifest sections that describe where a command ran."""

    tool: ToolInfo
    versions: Mapping[str, str | None]
    devices: tuple[DeviceInfo, ...]
    env: Mapping[str, str]

    def manifest_sections(self) -> dict[str, object]:
        """Keyword arguments of ``Manifest``, attributes of ``ManifestBuilder``."""
        return {
            "tool": self.tool,
            "versions": dict(self.versions),
            "devices": self.devices,
            "env": dict(self.env),
        }


def run_facts(environ: Mapping[str, str], *, torch: ModuleType | None = None) -> RunFacts:
    """The facts of this process; ``devices`` are all visible GPUs, ranks in their order."""
    return _run_facts(devices(environ.get("CUDA_VISIBLE_DEVICES")), environ, torch)


def _run_facts(
    survey: DeviceSurvey, environ: Mapping[str, str], torch: ModuleType | None
) -> RunFacts:
    return RunFacts(
        tool=tool_info(),
        versions=versions(survey, torch=torch),
        devices=survey.devices,
        env=recorded_env(environ),
    )


@dataclass(frozen=True, kw_only=True)
class EnvironmentReport:
    """What ``pagedctl env`` shows."""

    facts: RunFacts
    survey: DeviceSurvey
    cpu: CpuInfo
    capabilities: tuple[Capability, ...]

    def manifest_sections(self) -> dict[str, object]:
        """The header sections, with cpu and capabilities as the command's metrics."""
        metrics = {
            "cpu": self.cpu,
            "capabilities": self.capabilities,
            "driver_cuda": self.survey.driver_cuda,
        }
        return {**self.facts.manifest_sections(), "metrics": metrics}

    def to_json_object(self) -> dict[str, object]:
        sections = self.manifest_sections()
        metrics = sections.pop("metrics")
        assert isinstance(metrics, dict)
        return {**sections, **metrics}


def inspect_environment(
    *, environ: Mapping[str, str] | None = None, home: Path | None = None
) -> EnvironmentReport:
    """Look at everything that ``pagedctl`` rests on; imports torch, computes a little, keeps
    nothing.

    *environ* defaults to this process's; *home* is PAGEDCTL_HOME as the configuration resolved
    it (None: not looked at).
    """
    environ = os.environ if environ is None else environ
    survey = devices(environ.get("CUDA_VISIBLE_DEVICES"))
    torch, torch_import = capabilities.import_torch()
    cpu = cpu_info()
    return EnvironmentReport(
        facts=_run_facts(survey, environ, torch),
        survey=survey,
        cpu=cpu,
        capabilities=(
            torch_import,
            *capabilities.of_torch(torch, survey, cpu),
            *capabilities.of_packages(),
            capabilities.nvml(survey),
            *([] if home is None else [capabilities.home_writable(home)]),
        ),
    )
