"""The house's rules on imports: their direction, and who may not load torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What each package may import, itself apart. Torch-free data modules are named in full.
ALLOWED = {
    "pagedctl.errors": (),
    "pagedctl.manifest": ("pagedctl.errors",),
    "pagedctl.numerics": ("pagedctl.errors", "pagedctl.manifest", "pagedctl_kernels"),
    "pagedctl.models": (
        "pagedctl.errors",
        "pagedctl.manifest",
        "pagedctl.config",
        "pagedctl.numerics",
        "pagedctl_kernels",
    ),
    "pagedctl.config": (
        "pagedctl.errors",
        "pagedctl.manifest",
        "pagedctl.numerics.plugins",
        "pagedctl.numerics.resolution",
        "pagedctl.numerics.switches",
        "pagedctl.models.spec",
    ),
    "pagedctl.parallel": ("pagedctl.errors", "pagedctl.config", "pagedctl_kernels"),
    "pagedctl.engine": (
        "pagedctl.errors",
        "pagedctl.manifest",
        "pagedctl.config",
        "pagedctl.models",
        "pagedctl.numerics",
        "pagedctl.parallel",
        "pagedctl_kernels",
    ),
    "pagedctl_kernels": (),
}
LIBRARY = ("verify", "bench", "rollout", "server", "trainer", "planner", "probe")
ABOVE_ENGINE = ("pagedctl.cli", *(f"pagedctl.{name}" for name in LIBRARY))


def modules() -> Iterator[tuple[str, Path]]:
    for base in (ROOT, ROOT / "kernels"):
        for package in ("pagedctl", "pagedctl_kernels"):
            for path in sorted((base / package).rglob("*.py")):
                parts = path.relative_to(base).with_suffix("").parts
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def violations(module: str, imported: list[str]) -> list[str]:
    ours = [name for name in imported if name.split(".")[0] in ("pagedctl", "pagedctl_kernels")]
    for package, allowed in ALLOWED.items():
        if within(module, package):
            fine = (package, "pagedctl.__version__", *allowed)
            return [name for name in ours if not any(within(name, one) for one in fine)]
    if within(module, "pagedctl.cli") or module == "pagedctl.__main__":
        return []
    return [name for name in ours if within(name, "pagedctl.cli")]


def test_imports_follow_the_direction_of_the_house() -> None:
    seen = dict(modules())
    assert "pagedctl.cli.main" in seen
    assert "pagedctl_kernels.registry" in seen
    found = {
        name: bad for name, path in seen.items() if (bad := violations(name, [*imports(path)]))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("pagedctl_kernels.ops.gemm.spec", "pagedctl.errors.Fault"),
        ("pagedctl.config.loader", "pagedctl.engine.engine.Engine"),
        ("pagedctl.config.loader", "pagedctl.numerics.records"),
        ("pagedctl.manifest.reader", "pagedctl.config.loader"),
        ("pagedctl.engine.scheduler", "pagedctl.cli.main"),
        ("pagedctl.planner.capacity", "pagedctl.cli.main"),
        ("pagedctl.models.spec", "pagedctl.engine.request"),
    ],
)
def test_the_direction_check_sees_a_wrong_import(module: str, imported: str) -> None:
    assert violations(module, [imported]) == [imported]


HEAVY = ("torch", "triton", "transformers", "tokenizers")
TORCH_FREE = [
    "pagedctl",
    "pagedctl.errors",
    "pagedctl.config.engine_config",
    "pagedctl.config.surface",
    "pagedctl.config.plan_file",
    "pagedctl.manifest.schema",
    "pagedctl.manifest.writer",
    "pagedctl.manifest.reader",
    "pagedctl.manifest.peer_files",
    "pagedctl.manifest.environment",
    "pagedctl.numerics.eligibility",
    "pagedctl.numerics.pins",
    "pagedctl.numerics.plugins",
    "pagedctl.numerics.switches",
    "pagedctl.models.spec",
    "pagedctl.models.resolve",
    "pagedctl.models.text_stream",
    "pagedctl.engine.availability",
    "pagedctl.engine.block_pool",
    "pagedctl.engine.commit",
    "pagedctl.engine.completed_lines",
    "pagedctl.engine.completions",
    "pagedctl.engine.config_checks",
    "pagedctl.engine.live_requests",
    "pagedctl.engine.prefix_index",
    "pagedctl.engine.prefix_sharing",
    "pagedctl.engine.prompt_scores",
    "pagedctl.engine.request_check",
    "pagedctl.engine.request_limits",
    "pagedctl.engine.scheduler",
    "pagedctl.engine.score_lines",
    "pagedctl.engine.scoring",
    "pagedctl.engine.sequence",
    "pagedctl.engine.step_plan",
    "pagedctl.engine.step_counts",
    "pagedctl.engine.stop_texts",
    "pagedctl.engine.verification",
    "pagedctl.engine.watermark",
    "pagedctl.bench.kernels.shapes",
    "pagedctl.rollout.word_problems",
    "pagedctl.verify.case_result",
    "pagedctl.verify.comparison",
    "pagedctl.verify.float_bits",
    "pagedctl.verify.invariance_requests",
    "pagedctl.verify.localisation",
    "pagedctl.verify.planted_faults",
    "pagedctl.verify.stage_leaves",
    "pagedctl.verify.step_share",
    "pagedctl.verify.trace",
    "pagedctl.cli.invariance",
    "pagedctl.cli.invariance_table",
    "pagedctl.cli.main",
    "pagedctl.cli.resume_check",
    "pagedctl.cli.resume_header",
    "pagedctl_kernels",
    "pagedctl_kernels.registry",
    "pagedctl_kernels.plan",
    "pagedctl_kernels.house",
    "pagedctl_kernels.builds",
    "pagedctl_kernels.catalogue",
]


def loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.split())


def test_torch_free_modules_load_nothing_heavy() -> None:
    statement = "\n".join(f"import {name}" for name in TORCH_FREE)
    assert loaded_after(statement) == set()


MEASURES_TRITON = ("pagedctl_kernels.compile_report", "pagedctl.bench.kernels.report")


def test_triton_is_imported_by_modules_of_that_name() -> None:
    """Behind a leaf's entry, so that a machine without it serves what needs none."""
    found = {
        name
        for name, path in modules()
        if any(within(one, "triton") for one in imports(path))
        and not name.rpartition(".")[2].startswith("triton_")
    }
    assert found == set(MEASURES_TRITON)


def test_specs_and_builds_load_nothing_heavy() -> None:
    statement = (
        "from pagedctl_kernels.builds import house_builds\n"
        "from pagedctl_kernels.catalogue import house_registry\n"
        "house_registry()\nassert house_builds()"
    )
    assert loaded_after(statement) == set()


def test_the_torch_free_check_sees_torch() -> None:
    assert "torch" in loaded_after("import torch")


@pytest.mark.parametrize(
    "argv", [["--help"], ["env", "--help"], ["models", "inspect", "--help"], ["--version"]]
)
def test_help_loads_nothing_heavy(argv: list[str]) -> None:
    statement = (
        "import contextlib, io\nfrom pagedctl.cli.main import main\n"
        f"with contextlib.redirect_stdout(io.StringIO()) as out:\n    assert main({argv!r}) == 0\n"
        "assert 'pagedctl' in out.getvalue()"
    )
    assert loaded_after(statement) == set()
