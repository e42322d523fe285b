"""Argument checks and the choice of backend, shared by every kernel's wrapper."""

from __future__ import annotations

from typing import Literal

import torch

Backend = Literal["torch", "triton"]

# On CPU a GEMM's row keeps its bits whatever rows run beside it only if the row count is a multiple of the
# library's row tile: with 1 to 3 rows MKL takes other code paths. Everything that feeds a GEMM is padded to this.
ROW_TILE = 4


def padded_rows(num_rows: int) -> int:
    """The next multiple of ROW_TILE."""
    return -(-num_rows // ROW_TILE) * ROW_TILE


def use_triton(tensor: torch.Tensor, backend: Backend | None) -> bool:
    """True if the Triton kernel runs: forced by `backend`, else chosen by the tensor's device.

    Under TRITON_INTERPRET=1 a forced "triton" runs on CPU tensors; without it Triton itself refuses them.
    """
    return tensor.is_cuda if backend is None else backend == "triton"


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """Raise ValueError unless `tensor` has this shape; None matches any size."""
    actual = tensor.shape
    matches = len(actual) == len(shape)
    if matches:
        for want, got in zip(shape, actual, strict=True):
            if want is not None and want != got:
                matches = False
                break
    if not matches:
        text = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: expected shape [{text}], got {list(actual)}")


def check_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: must be contiguous, got strides {tensor.stride()}")


def check_last_dim_contiguous(name: str, tensor: torch.Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: the last dimension must be contiguous, got strides {tensor.stride()}")
