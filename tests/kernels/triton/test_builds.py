"""Every kernel compiles for both GPU generations, within its limits and as the table says."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedctl_kernels.builds import house_builds

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "kernels"
MODULE = "tests.kernels.triton.example_kernels"


def native_python(*words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """A Python that compiles kernels, whatever this process does with them."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT), str(PACKAGE), *filter(None, [kept.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": path},
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )


def declared(path: Path) -> Iterator[ast.FunctionDef]:
    """The functions of a module that Triton compiles."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            marks = map(ast.unparse, node.decorator_list)
            if any(mark.startswith(("triton.jit", "gluon.jit")) for mark in marks):
                yield node


def launched(base: Path, package: str) -> set[str]:
    """``module:function`` of each kernel in *package* that no other kernel calls."""
    kernels, called = {}, set()
    for path in sorted((base / package).rglob("*.py")):
        module = ".".join(path.relative_to(base).with_suffix("").parts)
        for function in declared(path):
            kernels[f"{module}:{function.name}"] = function.name
            called |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    return {kernel for kernel, name in kernels.items() if name not in called}


def test_every_launched_kernel_has_a_build() -> None:
    built = {build.kernel for builds in house_builds().values() for build in builds}
    kernels = launched(PACKAGE, "pagedctl_kernels")
    assert kernels
    assert kernels - built == set()


def test_the_scan_sees_kernels_and_not_what_they_call() -> None:
    found = launched(ROOT, "tests/kernels/triton")
    assert f"{MODULE}:multiply_add" in found
    assert f"{MODULE}:root_of_quotient" not in found


def test_every_build_compiles_within_its_limits() -> None:
    done = native_python("scripts/compile_kernels.py", "--json")
    found = json.loads(done.stdout)
    problems = {
        f"{one['kernel']} ({one['label']}), {one['target']}": one["problems"]
        for one in found
        if one["problems"]
    }
    assert problems == {}
    assert done.returncode == 0
    assert {one["target"] for one in found} == {"sm_80", "sm_90"}
    expected = [build for builds in house_builds().values() for build in builds]
    assert len(found) == sum(len(build.capabilities) for build in expected)
    assert all(one["report"]["registers"] > 0 for one in found)


REPORTS = """
import json, sys
from pagedctl_kernels.builds import Build
from pagedctl_kernels.compile_report import compile_build
for build in json.load(sys.stdin):
    for capability in (80, 90):
        print(json.dumps([*compile_build(Build(**build), capability).broken()]))
"""


def example(function: str, **changes: Any) -> dict[str, Any]:
    """A build of one of the example kernels, with limits that it keeps."""
    constants = {"BLOCK": 128, **changes.pop("constants", {})}
    build: dict[str, Any] = {
        "kernel": f"{MODULE}:{function}",
        "label": "example",
        "signature": {"x": "*fp32:16", "y": "*fp32:16", "out": "*fp32:16"},
        "constants": constants,
        "options": {"num_warps": 4, "enable_fp_fusion": changes.pop("fusion", False)},
        "registers": 255,
    }
    return {**build, **changes}


IEEE = {"BLOCK": 64, "PRECISION": "ieee"}
EXAMPLES: dict[str, tuple[dict[str, Any], str | None]] = {
    "separate": (example("multiply_add"), None),
    "contracted": (example("multiply_add", fusion=True), "multiply-adds are contracted"),
    "bfloat16 sum and product": (
        example(
            "sum_and_product",
            signature={"x": "*bf16:16", "y": "*bf16:16", "out": "*bf16:16"},
            constants={"BLOCK": 1024},
        ),
        None,
    ),
    "bfloat16, contracted": (
        example(
            "multiply_add",
            signature={"x": "*bf16:16", "y": "*bf16:16", "out": "*bf16:16"},
            constants={"BLOCK": 1024},
            fusion=True,
        ),
        "multiply-adds are contracted",
    ),
    "rounded division": (example("divide"), None),
    "rough division": (example("divide_roughly"), "div.full.f32 is in no order"),
    "float atomics": (example("add_atomically"), "add.f32 is in no order"),
    "too few registers": (example("multiply_add", registers=4), "registers, at most 4"),
    "IEEE product": (
        example("product", constants=IEEE, written_fma=True, spills=8192),
        None,
    ),
    "IEEE product, not announced": (
        example("product", constants=IEEE, spills=8192),
        "multiply-adds are contracted",
    ),
    "spills": (
        example("product", constants=IEEE, written_fma=True),
        "bytes of local memory, at most 0",
    ),
    "TF32 product": (
        example("product", constants={"BLOCK": 64, "PRECISION": "tf32"}),
        "f32.tf32.tf32",
    ),
}


@pytest.fixture(scope="module")
def problems() -> dict[str, list[list[str]]]:
    """What the report says of each example: one list a capability."""
    builds = [build for build, _ in EXAMPLES.values()]
    done = native_python("-c", REPORTS, stdin=json.dumps(builds))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: lines[2 * i : 2 * i + 2] for i, name in enumerate(EXAMPLES)}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_report_sees_what_a_kernel_may_not_be(
    name: str, problems: dict[str, list[list[str]]]
) -> None:
    _, wanted = EXAMPLES[name]
    for found in problems[name]:
        if wanted is None:
            assert found == []
        else:
            assert any(wanted in problem for problem in found)


def test_a_build_must_name_the_arguments_of_its_kernel() -> None:
    done = native_python("-c", REPORTS, stdin=json.dumps([example("product")]))
    assert "arguments of the kernel and of the build differ: PRECISION" in done.stderr
