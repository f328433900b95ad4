"""Environment variables that a switch pins: one list, and what is done with it. No torch.

Libraries read these when they are loaded, make a handle or form a group. Under a switch that
needs one, a variable that is not set is set, and an inherited value that voids the switch is
refused. Where no switch needs it, nothing is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from pagedctl.errors import Fault, NumericsRefused
from pagedctl.numerics.resolution import Numerics
from pagedctl.numerics.switches import Value, spelled


@dataclass(frozen=True, kw_only=True)
class Pin:
    """A variable that *switch* needs at one of *values* wherever the switch is *setting*.

    The first of *values* is set; they are compared without regard to case, as the libraries
    do. ``devices`` are those where the variable is read, ``needs_ranks`` says that a single
    rank never reads it, and ``why`` completes "otherwise ...".
    """

    variable: str
    values: tuple[str, ...]
    switch: str
    setting: Value
    devices: tuple[str, ...]
    why: str
    needs_ranks: bool = False

    def applies(self, numerics: Numerics) -> bool:
        """Whether the tree needs the pin on its device with its number of ranks."""
        on_ranks = numerics.tp > 1 or not self.needs_ranks
        needed = numerics[self.switch] == self.setting
        return needed and on_ranks and numerics.device in self.devices

    def keeps(self, value: str) -> bool:
        return value.strip().casefold() in {one.casefold() for one in self.values}


PINS: tuple[Pin, ...] = (
    Pin(
        variable="ONEDNN_DEFAULT_FPMATH_MODE",
        values=("STRICT",),
        switch="deterministic_kernels",
        setting=True,
        devices=("cpu",),
        why="oneDNN may round the inputs of float32 products",
    ),
    Pin(
        variable="DNNL_DEFAULT_FPMATH_MODE",
        values=("STRICT",),
        switch="deterministic_kernels",
        setting=True,
        devices=("cpu",),
        why="oneDNN, which also reads its old name, may round the inputs of float32 products",
    ),
    Pin(
        variable="OMP_DYNAMIC",
        values=("false", "0"),
        switch="deterministic_kernels",
        setting=True,
        devices=("cpu",),
        why="OpenMP takes fewer threads when the machine is busy, and a product other bits",
    ),
    Pin(
        variable="TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        values=("0",),
        switch="deterministic_kernels",
        setting=True,
        devices=("cpu", "cuda"),
        why="torch lowers the precision of every float32 product of the process",
    ),
    Pin(
        variable="NVIDIA_TF32_OVERRIDE",
        values=("0",),
        switch="deterministic_kernels",
        setting=True,
        devices=("cuda",),
        why="NVIDIA's libraries may take TF32 whatever the program asks for",
    ),
    Pin(
        variable="NCCL_ALGO",
        values=("Ring",),
        switch="deterministic_collectives",
        setting=True,
        devices=("cuda",),
        needs_ranks=True,
        why="NCCL takes the algorithm by message size, and with it the order of a sum",
    ),
    Pin(
        variable="NCCL_PROTO",
        values=("Simple",),
        switch="deterministic_collectives",
        setting=True,
        devices=("cuda",),
        needs_ranks=True,
        why="NCCL takes the protocol by message size, and with it the order of a sum",
    ),
    Pin(
        variable="NCCL_COLLNET_ENABLE",
        values=("0",),
        switch="deterministic_collectives",
        setting=True,
        devices=("cuda",),
        needs_ranks=True,
        why="the network may sum in an order of its own",
    ),
    Pin(
        variable="NCCL_NVLS_ENABLE",
        values=("0",),
        switch="symmetric_memory",
        setting=False,
        devices=("cuda",),
        needs_ranks=True,
        why="the NVLink switch may sum in an order that follows a row's place in the buffer",
    ),
    Pin(
        variable="NCCL_WIN_ENABLE",
        values=("0",),
        switch="symmetric_memory",
        setting=False,
        devices=("cuda",),
        needs_ranks=True,
        why="NCCL may take kernels of its own for buffers in symmetric memory",
    ),
)
"""Every pin. A sum never goes through NCCL under a contract: its pins are a second lock."""


def hold_pins(numerics: Numerics, environ: MutableMapping[str, str]) -> None:
    """Set in *environ* what the tree needs and is not set; an empty value counts as not set.

    Call it before any library handle or process group exists. Raises NumericsRefused for
    every inherited value that voids a switch, and then sets nothing.
    """
    needed = [one for one in PINS if one.applies(numerics)]
    faults = [
        _conflict(one, environ[one.variable])
        for one in needed
        if environ.get(one.variable) and not one.keeps(environ[one.variable])
    ]
    if faults:
        raise NumericsRefused.of(faults)
    for one in needed:
        if not environ.get(one.variable):
            environ[one.variable] = one.values[0]


def pins_in_force(numerics: Numerics, environ: Mapping[str, str]) -> dict[str, str | None]:
    """Every pinned variable with the value that holds, or None where no switch needs it here."""
    return {
        one.variable: environ.get(one.variable) if one.applies(numerics) else None for one in PINS
    }


def _conflict(pin: Pin, value: str) -> Fault:
    needed = " or ".join(pin.values)
    switch = f"{pin.switch} {spelled(pin.setting)}"
    return Fault(
        what=f"the environment variable {pin.variable} is {value}",
        where=f"environment variable {pin.variable}, switch {pin.switch}",
        rule=f"{switch} needs {pin.variable} {needed}: otherwise {pin.why}",
        remedy=f"unset {pin.variable}",
    )
