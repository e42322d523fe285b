"""One case table, three backends: the torch path on CPU, the interpreted Triton kernel on CPU, Triton on CUDA.

A kernel's test module declares its cases once and takes the `target` fixture (conftest.py):

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_matches_reference(case, target):
        x = target.place(torch.randn(case.num_rows, case.dim, generator=generator(case.name)))
        out = rms_norm(x, weight, eps, backend=target.backend)
        assert_close(out, rms_norm_reference(x, weight, eps), RELATIVE_TOLERANCE[x.dtype])
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from kernels.checks import Backend


@dataclass(frozen=True, slots=True)
class Target:
    """Where a case runs. bf16 cases run on `torch` and `cuda` only: the interpreter's bf16 arithmetic is wrong."""

    name: str  # "torch", "interpreted" or "cuda"
    device: str
    backend: Backend

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        if self.name == "interpreted":
            return (torch.float32, torch.float16)
        return (torch.float32, torch.float16, torch.bfloat16)

    def place(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return tensor.to(self.device, dtype)


TORCH = Target("torch", "cpu", "torch")
INTERPRETED = Target("interpreted", "cpu", "triton")
CUDA = Target("cuda", "cuda", "triton")


def generator(seed: int | str) -> torch.Generator:
    """A CPU generator; equal seeds (a case's name, say) give equal numbers on every target."""
    return torch.Generator().manual_seed(seed if isinstance(seed, int) else zlib.crc32(seed.encode()))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected|| in fp64; NaN anywhere in `actual` gives NaN."""
    difference = actual.double().cpu() - expected.double().cpu()
    norm = expected.double().norm().item()
    return difference.norm().item() / norm if norm else difference.norm().item()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Shapes are equal and the relative error is at most `tolerance`; NaN never passes."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    error = relative_error(actual, expected)
    assert error <= tolerance, f"relative error {error:.3g} > {tolerance:.3g}"


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Same dtype, shape and bits, NaN payloads and signs of zero included."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    different = (actual.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)).sum().item()
    assert different == 0, f"{different} bytes differ of {actual.numel() * actual.element_size()}"
