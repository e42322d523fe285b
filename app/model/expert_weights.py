"""Allocates a layer's experts and has a source fill them: in the model's dtype, or in an FP8 checkpoint's own."""

from __future__ import annotations

import torch

from app.model.checkpoint import SCALE_SUFFIX, Span, TensorSource, covering_blocks
from app.model.config import FP8_BLOCK, ModelConfig
from app.model.moe import Experts, Fp8Layer
from app.model.sharding import piece_ends
from kernels.checks import Backend, use_triton
from kernels.experts_cpu import CpuExperts
from kernels.fp8_experts import Fp8Experts


def keeps_fp8(config: ModelConfig, width: Span, device: torch.device, backend: Backend | None) -> bool:
    """Whether experts of this part of the width stay in FP8: the kernels for it run, and its blocks are whole."""
    if not config.is_fp8 or not use_triton(torch.empty(0, device=device), backend):
        return False
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return False
    return not any(size % FP8_BLOCK for size in (config.hidden_size, width.start, width.count))


class ExpertStack:
    """`count` experts, each of `width` of its hidden values."""

    def __init__(
        self, config: ModelConfig, count: int, width: Span, dtype: torch.dtype, device: torch.device,
        backend: Backend | None,
    ) -> None:  # fmt: skip
        self._hidden, self._backend = Span.whole(config.hidden_size), backend
        self._is_fp8 = keeps_fp8(config, width, device, backend)
        sample = torch.empty(0, dtype=dtype, device=device)
        # On a CPU one expert after the other passes through the same memory.
        is_packed = not use_triton(sample, backend) and CpuExperts.can_hold(sample)
        self._packed = CpuExperts(count, piece_ends(config, width)) if is_packed else None
        if is_packed:
            count = 1
        stored = torch.float8_e4m3fn if self._is_fp8 else dtype
        rows, columns = width.count, config.hidden_size
        self._gate_up = torch.empty(count, 2 * rows, columns, dtype=stored, device=device)
        self._down = torch.empty(count, columns, rows, dtype=stored, device=device)
        if self._is_fp8:
            rows, columns = rows // FP8_BLOCK, columns // FP8_BLOCK
            self._gate_up_scales = torch.empty(count, 2 * rows, columns, dtype=torch.float32, device=device)
            self._down_scales = torch.empty(count, columns, rows, dtype=torch.float32, device=device)

    def fill(self, source: TensorSource, slot: int, prefix: str, width: Span) -> None:
        """Expert number `slot` from the tensors named with `prefix` or this part of their width."""
        hidden = self._hidden
        place = slot if self._packed is None else 0
        gate, up = self._gate_up[place].chunk(2)
        parts = {"gate_proj": (gate, width, hidden), "up_proj": (up, width, hidden)}
        parts["down_proj"] = (self._down[place], hidden, width)
        for name, (part, *spans) in parts.items():
            source.fill(f"{prefix}{name}.weight", part, spans)
        if self._packed is not None:
            self._packed.put(slot, self._gate_up[0], self._down[0])
        if self._is_fp8:
            gate, up = self._gate_up_scales[slot].chunk(2)
            scales = {"gate_proj": gate, "up_proj": up, "down_proj": self._down_scales[slot]}
            for name, (_, *spans) in parts.items():
                blocks = [covering_blocks(span) for span in spans]
                source.fill(f"{prefix}{name}.weight{SCALE_SUFFIX}", scales[name], blocks)

    def skip(self, source: TensorSource, prefix: str) -> None:
        """Take note of an expert that lies elsewhere."""
        for name in ("gate_proj", "up_proj", "down_proj"):
            source.skip(f"{prefix}{name}.weight")

    def experts(self) -> Experts | Fp8Layer:
        if self._packed is not None:
            return Experts(self._packed, self._backend)
        if not self._is_fp8:
            return Experts((self._gate_up, self._down), self._backend)
        weights = Fp8Experts(self._gate_up, self._gate_up_scales, self._down, self._down_scales)
        return Fp8Layer(weights, self._backend)
