"""An FP8 cache entry of latent attention: the latent in e4m3, the rotated key as it is, one scale for both.

    byte   0            R                          R + P * size      + 4
    entry  | R x e4m3   | P x model dtype          | scale: fp32     | padding to a multiple of 16 |
           | latent / scale | rotated key / scale  |

The scale is a power of two, so that dividing by it rounds nothing and e4m3 * scale is exact in bf16: whoever reads an
entry sees the same numbers, and a score is one product over the whole entry times the scale. A floating-point format
loses nothing by such a scale, except what falls below its smallest numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MIN_ENTRY_SCALE = 2.0**-6
_ALIGNMENT = 16  # bytes, of bulk copies


@dataclass(frozen=True, slots=True)
class Fp8Entry:
    """The layout for a latent of `rank` values, a multiple of 4, and `rope_dim` values of `dtype`."""

    rank: int
    rope_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.rank % 4 or self.scale_start % 4:
            raise ValueError(f"FP8 entries need a latent and a rotated key of whole words, got {self}")

    @property
    def num_bytes(self) -> int:
        return -(-(self.scale_start + 4) // _ALIGNMENT) * _ALIGNMENT

    @property
    def scale_start(self) -> int:
        return self.rank + self.rope_dim * self.dtype.itemsize

    def check(self, cache: torch.Tensor) -> None:
        """Raise ValueError unless `cache` is [..., num_bytes] uint8."""
        if cache.dtype != torch.uint8 or cache.shape[-1] != self.num_bytes:
            raise ValueError(
                f"cache: expected FP8 entries of {self.num_bytes} uint8, got {list(cache.shape)} {cache.dtype}"
            )

    def views(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """latents [..., R] e4m3, rope parts [..., P] dtype, scales [...] fp32: strided views of `cache`."""
        self.check(cache)
        latents = cache.view(torch.float8_e4m3fn)[..., : self.rank]
        rope_start = self.rank // self.dtype.itemsize
        ropes = cache.view(self.dtype)[..., rope_start : rope_start + self.rope_dim]
        return latents, ropes, cache.view(torch.float32)[..., self.scale_start // 4]

    def pack(self, entries: torch.Tensor) -> torch.Tensor:
        """[..., R + P] fp32 -> [..., num_bytes] uint8: the definition of an entry."""
        packed = torch.zeros(*entries.shape[:-1], self.num_bytes, dtype=torch.uint8, device=entries.device)
        latents, ropes, scales = self.views(packed)
        latent = entries[..., : self.rank].float()
        scales.copy_(entry_scale(latent.abs().amax(-1)))
        latents.copy_((latent / scales.unsqueeze(-1)).to(torch.float8_e4m3fn))
        ropes.copy_(entries[..., self.rank :].to(self.dtype) / scales.unsqueeze(-1))
        return packed

    def unpack(self, cache: torch.Tensor) -> torch.Tensor:
        """[..., num_bytes] uint8 -> [..., R + P] in `dtype`."""
        latents, ropes, scales = self.views(cache)
        return torch.cat([(part.float() * scales.unsqueeze(-1)).to(self.dtype) for part in (latents, ropes)], dim=-1)


def power_of_two_scale(largest: torch.Tensor) -> torch.Tensor:
    """The smallest power of two s with largest / s <= 448, fp32; of 0 the smallest normal one."""
    bits = largest.float().contiguous().view(torch.int32)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).int()  # 448 = 1.75 * 2^8
    return (exponent.clamp_(min=1) << 23).view(torch.float32)


def entry_scale(largest: torch.Tensor) -> torch.Tensor:
    """power_of_two_scale of a latent's largest value, bounded so that a rotated key of fp16 may be divided by it."""
    return power_of_two_scale(largest).clamp_(min=MIN_ENTRY_SCALE)


@triton.jit
def scale_of(largest, MIN_EXPONENT: tl.constexpr = -126):
    """power_of_two_scale of fp32 values, at least 2^MIN_EXPONENT: (scale, 1 / scale), both exact."""
    bits = largest.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.maximum(exponent, MIN_EXPONENT + 127)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    return scale, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def round_to_e4m3(x, dtype: tl.constexpr):
    """fp32 of at most 448 to the nearest e4m3, ties to even.

    The sum with 1.5 * 2^23 steps of the format leaves whole steps; the conversion after it has nothing to round.
    Triton's interpreter would drop a carry into the exponent there.
    """
    exponent = (x.to(tl.int32, bitcast=True) >> 23) & 0xFF
    step = (tl.maximum(exponent, 127 - 6) - 3 + 23) << 23
    anchor = step.to(tl.float32, bitcast=True) * 1.5
    return ((x + anchor) - anchor).to(dtype)
