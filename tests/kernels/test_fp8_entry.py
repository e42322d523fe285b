"""FP8 cache entries: layout, exactness of the scale, rounding error, edge values."""

from __future__ import annotations

import pytest
import torch

from kernels.fp8_entry import MIN_ENTRY_SCALE, Fp8Entry, power_of_two_scale
from tests.kernels.cases import generator

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max


@pytest.mark.parametrize(
    ("entry", "num_bytes"),
    [
        (Fp8Entry(512, 64, torch.bfloat16), 656),
        (Fp8Entry(512, 64, torch.float32), 784),
        (Fp8Entry(24, 8, torch.float16), 48),
        (Fp8Entry(128, 32, torch.bfloat16), 208),
    ],
)
def test_sizes(entry: Fp8Entry, num_bytes: int) -> None:
    assert entry.num_bytes == num_bytes
    latents, ropes, scales = entry.views(torch.zeros(3, 4, num_bytes, dtype=torch.uint8))
    assert latents.shape == (3, 4, entry.rank) and ropes.shape == (3, 4, entry.rope_dim) and scales.shape == (3, 4)


def test_parts_do_not_overlap() -> None:
    entry = Fp8Entry(24, 6, torch.float16)
    cache = torch.zeros(2, entry.num_bytes, dtype=torch.uint8)
    for part, value in zip(entry.views(cache), (1.0, 2.0, 4.0), strict=True):
        part.copy_(torch.full(part.shape, value))
    assert [part.float().unique().tolist() for part in entry.views(cache)] == [[1.0], [2.0], [4.0]]


def test_the_scale_is_the_smallest_power_of_two_that_fits() -> None:
    largest = torch.tensor([448.0, 448.01, 224.0, 1.75, 1.7500001, 1e-3, 3e38, 0.0, 1e-45])
    scales = power_of_two_scale(largest)
    mantissas, _ = torch.frexp(scales)
    assert (mantissas == 0.5).all()
    assert (largest / scales <= E4M3_MAX).all()
    regular = largest > 1e-30
    assert (largest / scales * 2 > E4M3_MAX)[regular].all()
    assert scales[:2].tolist() == [1.0, 2.0]


def test_dequantised_values_are_exact_in_bfloat16_and_close() -> None:
    entry = Fp8Entry(512, 64, torch.bfloat16)
    values = torch.randn(50, 576, generator=generator("entry")) * torch.logspace(-3, 3, 50).unsqueeze(1)
    cache = entry.pack(values)
    unpacked = entry.unpack(cache)
    latents, _, scales = entry.views(cache)
    assert torch.equal(unpacked[:, :512].float(), latents.float() * scales.unsqueeze(1))
    assert torch.equal(unpacked[:, 512:], values[:, 512:].bfloat16())
    error = (unpacked[:, :512].float() - values[:, :512]).abs()
    # Half of e4m3's spacing of 2^-3, or of the spacing of its subnormal numbers, 2^-9.
    assert (error <= torch.maximum(values[:, :512].abs() * 2**-4, scales.unsqueeze(1) * 2**-10)).all()
    assert scales.min() == MIN_ENTRY_SCALE and scales.max() > 2.0
    again = entry.unpack(entry.pack(unpacked.float()))
    assert torch.equal(again, unpacked)  # numbers that are in the format stay as they are


def test_a_row_of_zeros_stays_zero_and_large_values_stay_finite() -> None:
    entry = Fp8Entry(8, 2, torch.float32)
    values = torch.zeros(2, 10)
    values[1, :4] = torch.tensor([1e30, -1e30, 1e-30, 5e29])
    unpacked = entry.unpack(entry.pack(values))
    assert torch.equal(unpacked[0], values[0])
    assert unpacked.isfinite().all() and unpacked[1, 0] == pytest.approx(1e30, rel=2**-4)


def test_other_layouts_are_refused() -> None:
    entry = Fp8Entry(24, 8, torch.float16)
    with pytest.raises(ValueError, match="expected FP8 entries of 48 uint8"):
        entry.check(torch.zeros(2, 47, dtype=torch.uint8))
    with pytest.raises(ValueError, match="expected FP8 entries of 48 uint8"):
        entry.check(torch.zeros(2, 48))
    with pytest.raises(ValueError, match="whole words"):
        Fp8Entry(22, 8, torch.float16)
