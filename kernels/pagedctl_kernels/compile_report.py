"""Compiles a build of a Triton kernel for a GPU that need not be there, and says what came out."""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from pagedctl_kernels.builds import Build, Constant

_TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

_FMA = re.compile(r"\bfma\.r[nzmp][\w.]*")
_BFLOAT16_FMA = re.compile(r"\bfma\.rn\.bf16(?:x2)?\s+\S+, (\S+), (\S+), (\S+);")
_CONSTANT = re.compile(r"\bmov\.b(?:16|32)\s+(%\w+), (0x[0-9a-fA-F]+|-?\d+);")
_ONE, _MINUS_ZERO = (0x3F80, 0x3F803F80), (0x8000, 0x80008000)
_EXPANDED = re.compile(r"\b(?:div|sqrt|rcp)\.rn[\w.]*|\b(?:div|rem)\.[su]\d+|\bcvt\.\w+\.[su]64")
"""PTX instructions that the assembler expands with multiply-adds of its own."""

_FORBIDDEN = re.compile(
    r"\b(?:div\.(?:full|approx)|sqrt\.approx|rsqrt\.approx|rcp\.approx|lg2\.approx|sin\.approx"
    r"|cos\.approx|tanh\.approx)[\w.]*"
    r"|\b(?:atom|red)\.[\w.]*\.b?f(?:16|32|64)\w*"
    r"|\bw?g?mma[\w.]*\.tf32[\w.]*|\bmultimem[\w.]*"
)
"""What no order of the house allows: approximations other than ex2, float atomics, TF32."""

_MATRIX = re.compile(r"\b(wgmma\.mma_async[\w.]*|mma\.sync[\w.]*)")
_COPY = re.compile(r"\b(cp\.async\.bulk\.tensor|cp\.async\.bulk(?!\.tensor)|cp\.async(?!\.bulk))\b")


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """What one build became for one compute capability.

    ``registers`` a thread, ``local_bytes`` a thread (spills and stack), ``shared_bytes`` a
    program. ``fused`` counts multiply-adds: those of the PTX, and those of the machine code where
    no instruction of the PTX accounts for them. ``forbidden``, ``matrix`` and ``copies`` are kinds
    of PTX instructions.
    """

    build: Build
    capability: int
    registers: int
    local_bytes: int
    shared_bytes: int
    fused: int
    forbidden: tuple[str, ...]
    matrix: tuple[str, ...]
    copies: tuple[str, ...]

    def broken(self) -> Iterator[str]:
        """Each limit of the build that it does not keep."""
        build = self.build
        if self.registers > build.registers:
            yield f"{self.registers} registers, at most {build.registers}"
        if self.local_bytes > build.spills:
            yield f"{self.local_bytes} bytes of local memory, at most {build.spills}"
        if self.fused and not build.written_fma:
            yield f"{self.fused} multiply-adds are contracted"
        for kind in self.forbidden:
            yield f"{kind} is in no order"


def compile_build(build: Build, capability: int) -> CompileReport:
    """Compile *build* for *capability* (90 for sm_90); needs no GPU.

    Raises ValueError if the build does not name the kernel's arguments, RuntimeError under the
    interpreter, and what the compiler raises.
    """
    kernel = _kernel(build)
    compiled = triton.compile(
        _source(build, kernel),
        target=GPUTarget("cuda", capability, 32),
        options=dict(build.options),
    )
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    code = "\n".join(line.partition("//")[0] for line in ptx.splitlines())
    usage = _dump("-res-usage", cubin)
    return CompileReport(
        build=build,
        capability=capability,
        registers=_used("REG", usage),
        local_bytes=max(_used("STACK", usage), _used("LOCAL", usage)),
        shared_bytes=compiled.metadata.shared,
        fused=_fused(code, cubin),
        forbidden=_kinds(_FORBIDDEN, code),
        matrix=_kinds(_MATRIX, code),
        copies=_kinds(_COPY, code),
    )


def _kernel(build: Build) -> Any:
    module, _, name = build.kernel.partition(":")
    kernel = getattr(importlib.import_module(module), name)
    if not isinstance(kernel, triton.runtime.JITFunction):
        raise RuntimeError(f"{build.kernel} is a {type(kernel).__name__}: unset TRITON_INTERPRET")
    return kernel


def _source(build: Build, kernel: Any) -> ASTSource:
    names: list[str] = kernel.arg_names
    stated = {*build.signature, *build.constants}
    if stated != set(names) or len(build.signature) + len(build.constants) != len(names):
        odd = ", ".join(sorted(stated ^ set(names))) or "one is stated twice"
        raise ValueError(f"{build}: arguments of the kernel and of the build differ: {odd}")
    types = {name: build.signature.get(name, "constexpr").partition(":") for name in names}
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return source(
        fn=kernel,
        signature={name: kind for name, (kind, _, _) in types.items()},
        constexprs={(names.index(name),): _constant(c) for name, c in build.constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", int(multiple)]]
            for name, (_, _, multiple) in types.items()
            if multiple
        },
    )


def _constant(value: Constant) -> Any:
    if isinstance(value, str) and value.startswith("tl."):
        return getattr(tl, value.removeprefix("tl."))
    return value


def _fused(code: str, cubin: bytes) -> int:
    """Multiply-adds of the PTX, or those that the assembler made of separate instructions."""
    if _FMA.search(code) or _EXPANDED.search(code):
        return len(_FMA.findall(code)) - _plain_bfloat16(code)
    return len(re.findall(r"\b(?:FFMA|DFMA|HFMA2)\b(?!\.MMA)", _dump("-sass", cubin)))


def _plain_bfloat16(code: str) -> int:
    """How many bfloat16 multiply-adds are plain sums (x * 1 + y) and products (x * y + -0).

    sm_80 has no other instruction for them.
    """
    constants = {name: int(text, 0) % 2**32 for name, text in _CONSTANT.findall(code)}
    operands = [[constants.get(one) for one in found] for found in _BFLOAT16_FMA.findall(code)]
    return sum(a in _ONE or b in _ONE or c in _MINUS_ZERO for a, b, c in operands)


def _kinds(pattern: re.Pattern[str], code: str) -> tuple[str, ...]:
    return tuple(sorted(Counter(match.group(0) for match in pattern.finditer(code))))


def _used(what: str, usage: str) -> int:
    return max(map(int, re.findall(rf"\b{what}:(\d+)", usage)))


def _dump(option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [_TOOL, option, file.name], capture_output=True, text=True, check=True
        )
    return done.stdout
