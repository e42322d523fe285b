"""Every kernel on CUDA, in the shapes that are served: twenty runs on the same inputs give the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.blocks import gather_blocks
from kernels.expert_routing import route_experts
from kernels.fp8_entry import Fp8Entry
from kernels.head_projection import project_heads
from kernels.mla_decode import mla_decode
from kernels.mla_prefill import mla_prefill
from kernels.mla_rope_cache import mla_rope_cache
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.sampling import sample
from tests.kernels.cases import assert_bitwise_equal

pytestmark = pytest.mark.gpu

BLOCK, RANK, ROPE, HEADS = 64, 512, 64, 16
LENS = (1000, 64, 1, 65, 2049)
Run = Callable[[], list[torch.Tensor]]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def paged(is_fp8: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cache, tables and lengths."""
    per_sequence = -(-max(LENS) // BLOCK)
    cache = randn(len(LENS) * per_sequence, BLOCK, RANK + ROPE)
    if is_fp8:
        cache = Fp8Entry(RANK, ROPE, torch.bfloat16).pack(cache)
    return cache, torch.randperm(len(cache), device="cuda").int().view(len(LENS), -1), integers(*LENS)


def decode(is_fp8: bool, num_heads: int) -> Run:
    q, paged_cache = randn(len(LENS), num_heads, RANK + ROPE), paged(is_fp8)
    return lambda: [mla_decode(q, *paged_cache, 0.1, RANK)]


def gather(is_fp8: bool) -> Run:
    entry = Fp8Entry(RANK, ROPE, torch.bfloat16) if is_fp8 else None
    cache, tables, lens = paged(is_fp8)
    starts = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    return lambda: [gather_blocks(cache, tables, lens, starts, sum(LENS), entry=entry)]


def prefill() -> Run:
    q, kv, k_rope = randn(700, HEADS, 192), randn(900, HEADS, 256), randn(900, ROPE)
    starts, key_starts = integers(0, 300, 300, 700), integers(0, 400, 500, 900)
    arguments = q, kv[..., :128], k_rope, kv[..., 128:], starts, key_starts, 0.1
    return lambda: [mla_prefill(*arguments, max_query_len=400, max_key_len=400)]


def rope(is_fp8: bool) -> Run:
    q, kv, weight = randn(50, HEADS, 192), randn(50, RANK + ROPE), randn(RANK)
    cos_sin, slots = torch.randn(4096, ROPE, device="cuda"), torch.randperm(4 * BLOCK, device="cuda")[:50]
    empty = torch.zeros(4, BLOCK, RANK + ROPE, device="cuda", dtype=torch.bfloat16)
    cache = Fp8Entry(RANK, ROPE, torch.bfloat16).pack(empty) if is_fp8 else empty

    def run() -> list[torch.Tensor]:
        rotated, written = q.clone(), cache.clone()
        mla_rope_cache(rotated, kv, weight, 1e-6, cos_sin, slots, slots, written, interleaved=True)
        return [rotated, written]

    return run


def norms() -> Run:
    x, residual, weight = randn(300, 2048), randn(300, 2048), randn(2048)

    def run() -> list[torch.Tensor]:
        total = residual.clone()
        return [rms_norm(x, weight, 1e-6), add_rms_norm(x, total, weight, 1e-6), total]

    return run


def route() -> Run:
    logits = torch.randn(500, 64, device="cuda").round(decimals=1)  # ties
    return lambda: list(
        route_experts(
            logits, None, top_k=6, num_groups=1, top_groups=1,
            scoring="softmax", group_score="max", normalize=False, scale=1.0,
        )
    )  # fmt: skip


def project() -> Run:
    x, weight = randn(40, HEADS, 128 + ROPE), randn(HEADS, 128, RANK)
    return lambda: [project_heads(x, weight, tail=ROPE)]


def draw() -> Run:
    logits, zeros = torch.randn(8, 102_400, device="cuda") * 3, torch.zeros(8, device="cuda")
    ids, top_k = torch.arange(8, device="cuda"), integers(0, 50, 0, 50, 1, 0, 7, 0)
    temperature, top_p = zeros + 0.8, torch.linspace(0.5, 1.0, 8, device="cuda")
    return lambda: [sample(logits, temperature, top_k, top_p, zeros + 0.01, ids, ids)]


RUNS: dict[str, Callable[[], Run]] = {
    "decode": lambda: decode(False, 16),
    "decode 128 heads": lambda: decode(False, 128),
    "decode fp8": lambda: decode(True, 16),
    "decode fp8 128 heads": lambda: decode(True, 128),
    "gather": lambda: gather(False),
    "gather fp8": lambda: gather(True),
    "prefill": prefill,
    "rope": lambda: rope(False),
    "rope fp8": lambda: rope(True),
    "norms": norms,
    "route": route,
    "project": project,
    "sample": draw,
}


@pytest.mark.parametrize("name", RUNS)
def test_twenty_runs_give_the_same_bits(name: str) -> None:
    torch.manual_seed(0)
    run = RUNS[name]()
    first = run()
    for _ in range(20):
        for actual, expected in zip(run(), first, strict=True):
            assert_bitwise_equal(actual, expected)
