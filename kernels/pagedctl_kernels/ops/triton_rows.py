"""Checks of operands that a Triton leaf reads by row address."""

from __future__ import annotations

import torch


def row_stride(what: str, tensor: torch.Tensor) -> int:
    """Elements between rows of tensor [T, n]; raises ValueError if a row has gaps."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{what} must have rows without gaps, its strides are {tensor.stride()}")
    return tensor.stride(0)


def expect_contiguous(what: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless *tensor* is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{what} must be contiguous, its strides are {tensor.stride()}")


def expect_device(what: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise ValueError unless *tensor* lies on *device*, where the launch happens."""
    if tensor.device != device:
        raise ValueError(f"{what} must be on {device}, it is on {tensor.device}")
