"""Set before any kernel is imported: without a GPU, Triton kernels run in Triton's interpreter."""

from __future__ import annotations

import os

import torch

# `@triton.jit` reads the variable when the kernel is defined. CPU tensors take the torch path unless a test forces
# the Triton backend, so the variable changes nothing for the other tests.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
