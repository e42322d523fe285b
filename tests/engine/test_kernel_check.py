"""Attention over FP8 entries is checked before it serves."""

from __future__ import annotations

import pytest
import torch

from app.bench.random_engine import shape_config
from app.config import EMBEDDED_MODEL, EngineConfig, ModelSource
from app.engine import kernel_check
from app.engine.kernel_check import check_fp8_attention
from app.engine.loading import load_engine
from app.errors import PreflightError
from app.model.config import ModelConfig
from kernels.mla_decode import mla_decode

CPU = torch.device("cpu")


def test_right_kernels_pass() -> None:
    check_fp8_attention(ModelConfig.from_folder(EMBEDDED_MODEL), CPU, torch.float32, None)
    check_fp8_attention(shape_config("deepseek-v2-lite"), CPU, torch.float32, "torch")


@pytest.mark.parametrize("factor", [1.05, float("nan")])
def test_a_wrong_kernel_ends_the_start(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_check, "mla_decode", lambda *args, **options: mla_decode(*args, **options) * factor)
    with pytest.raises(PreflightError, match=r"engine\.cache_dtype: attention over FP8 entries is wrong on cpu"):
        load_engine(ModelSource(), EngineConfig(device="cpu", cache_dtype="fp8", cache_blocks=8, num_threads=1))
    load_engine(ModelSource(), EngineConfig(device="cpu", cache_blocks=8, num_threads=1))  # not asked for: not checked


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_served_shapes_pass_on_cuda(dtype: torch.dtype) -> None:
    check_fp8_attention(shape_config("deepseek-v2-lite"), torch.device("cuda"), dtype, None)
    check_fp8_attention(ModelConfig.from_folder(EMBEDDED_MODEL), torch.device("cuda"), dtype, None)
