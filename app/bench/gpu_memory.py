"""How much memory is in use on each GPU of this machine, by all processes, as the driver says."""

from __future__ import annotations

import subprocess

_COMMAND = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
_TIMEOUT_S = 20.0


def gpu_memory_bytes() -> list[int]:
    """By GPU; empty on a machine without them."""
    try:
        done = subprocess.run(_COMMAND, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        return [int(line) * 2**20 for line in done.stdout.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def is_freed(now: list[int], before: list[int], slack_bytes: int) -> bool:
    """Whether every GPU has no more in use than before, but for `slack_bytes`; true on a machine without GPUs."""
    return len(now) == len(before) and all(a <= b + slack_bytes for a, b in zip(now, before, strict=True))
