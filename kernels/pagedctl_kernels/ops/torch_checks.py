"""Dtype names to torch dtypes, and the checks of operands and of torch's own settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.plan import LeafUnfit

TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float64": torch.float64,
    }
)


def operand_dtype(site: CallSite, operand: str) -> torch.dtype:
    """The torch dtype of *operand* at *site*."""
    return TORCH_DTYPES[site.dtypes[operand]]


def dtype_fact(site: CallSite, fact: str) -> torch.dtype:
    """The torch dtype that a fact of *site* names (``internal``, ``softmax_p_dtype``, ...)."""
    return TORCH_DTYPES[str(site.facts[fact])]


def int_fact(site: CallSite, fact: str) -> int:
    value = site.facts[fact]
    if not isinstance(value, int):
        raise ValueError(f"{site.op} at {site.name}: fact {fact} is {value!r}, not an integer")
    return value


def float_fact(site: CallSite, fact: str) -> float:
    value = site.facts[fact]
    if not isinstance(value, int | float):
        raise ValueError(f"{site.op} at {site.name}: fact {fact} is {value!r}, not a number")
    return float(value)


def expect(
    what: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int | str, ...]
) -> None:
    """Raise ValueError unless *tensor* has *dtype* and *shape*; a name is a free dimension."""
    if tensor.dtype == dtype and tensor.dim() == len(shape) and _fits(tensor, shape):
        return
    wanted = ", ".join(map(str, shape))
    have = ", ".join(map(str, tensor.shape))
    raise ValueError(
        f"{what} must be {_short(dtype)} [{wanted}], got {_short(tensor.dtype)} [{have}]"
    )


def require_ieee(site: CallSite) -> None:
    """Raise LeafUnfit if a setting of this process voids IEEE arithmetic in matrix products.

    Such settings narrow every product alike, so no comparison of one product with another
    shows them, and they may change after a construction check was remembered.
    """
    for setting, remedy in settings_that_void_ieee(dtype_fact(site, "internal")):
        raise LeafUnfit(
            f"{site.name}: {setting}, so products are not IEEE ones; {remedy} before plans are made"
        )


def settings_that_void_ieee(internal: torch.dtype) -> Iterator[tuple[str, str]]:
    """Each setting that voids IEEE products, as the user finds it, and what to call instead."""
    general = _general_precision()
    if general not in ("highest", None):
        yield (
            f'torch.get_float32_matmul_precision() is "{general}"',
            'call torch.set_float32_matmul_precision("highest")',
        )
    backend = getattr(torch.backends.mkldnn, "matmul", None)
    own = getattr(backend, "fp32_precision", "none")
    if own not in ("ieee", "none"):
        yield (
            f'torch.backends.mkldnn.matmul.fp32_precision is "{own}"',
            'set torch.backends.mkldnn.matmul.fp32_precision = "ieee"',
        )
    subnormal = torch.tensor(torch.finfo(internal).tiny, dtype=internal) / 2**14
    if not subnormal:
        yield (
            f"{_short(internal)} subnormals are flushed to zero",
            "call torch.set_flush_denormal(False)",
        )


def _general_precision() -> str | None:
    """None where torch gives no answer, since backends differ: the CPU's own setting decides."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _fits(tensor: torch.Tensor, shape: tuple[int | str, ...]) -> bool:
    """A loop, not all(): this runs at every call of every op."""
    for want, have in zip(shape, tensor.shape, strict=True):
        if want != have and isinstance(want, int):
            return False
    return True


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def has_bfloat16_products() -> bool:
    """Whether this CPU multiplies bfloat16 natively; without it the library only emulates."""
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(supported is not None and supported())
