"""Programmatic dependent launch on Hopper: a kernel is set up, and may read weights, while the one before still runs.

A kernel so launched calls `wait_for_previous` before it touches anything that an earlier kernel writes. Past the wait
all earlier kernels are done, since every one of them has waited itself. The next kernel is let in before the wait: its
programs take only what room this one's leave, since all of this one's have begun by then.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@lru_cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """The keyword arguments of a kernel that takes PDL: all off where the device cannot do it."""
    is_supported = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return {"PDL": True, "launch_pdl": True} if is_supported else {"PDL": False}


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
