"""How often each expert was chosen, as the host knows it without ever waiting for a device."""

from __future__ import annotations

import time

import torch

COPY_PERIOD_S = 0.5


class ExpertCounts:
    def __init__(self, layers: tuple[int, ...], counts: torch.Tensor) -> None:
        """counts: [layers, num_experts] int64, which steps add to."""
        self._layers, self._rows = layers, counts
        self._host = self._rows
        if self._rows.is_cuda:
            self._host = torch.zeros(self._rows.shape, dtype=torch.int64, pin_memory=True)
        self._copied_s = 0.0

    def refresh(self) -> None:
        """Enqueue a copy for the host, now and then; in the thread that launches steps."""
        if self._rows.is_cuda and time.monotonic() - self._copied_s > COPY_PERIOD_S:
            self._copied_s = time.monotonic()
            self._host.copy_(self._rows, non_blocking=True)

    def snapshot(self) -> dict[str, int]:
        """Tokens by "layer.expert", as of the last copy; from any thread."""
        return {
            f"{layer}.{expert}": count
            for layer, row in zip(self._layers, self._host.tolist(), strict=True)
            for expert, count in enumerate(row)
        }

    def reset(self) -> None:
        self._rows.zero_()
        self._host.zero_()
