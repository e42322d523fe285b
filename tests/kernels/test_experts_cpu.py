"""CpuExperts against fused_experts' reference, and bitwise against itself in other batches."""

from __future__ import annotations

import pytest
import torch

from kernels.experts_cpu import CpuExperts
from kernels.fused_experts import fused_experts_reference
from tests.kernels.cases import assert_bitwise_equal, assert_close, generator

RELATIVE_TOLERANCE = 2e-6  # fp32 sums in another order

Weights = tuple[torch.Tensor, torch.Tensor]


def weights_of(num_experts: int, dim: int, inter: int) -> Weights:
    random = generator("weights")
    gate_up = torch.randn(num_experts, 2 * inter, dim, generator=random) * dim**-0.5
    return gate_up, torch.randn(num_experts, dim, inter, generator=random) * inter**-0.5


def tokens_of(
    num_tokens: int, dim: int, num_experts: int, top_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = generator("tokens")
    ids = torch.stack([torch.randperm(num_experts, generator=random)[:top_k] for _ in range(num_tokens)]).int()
    return torch.randn(num_tokens, dim, generator=random), ids, torch.rand(num_tokens, top_k, generator=random)


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 16, 37])
@pytest.mark.parametrize(("num_experts", "dim", "inter", "top_k"), [(17, 384, 128, 5), (5, 33, 7, 5), (6, 40, 24, 1)])
def test_matches_the_reference(num_experts: int, dim: int, inter: int, top_k: int, num_tokens: int) -> None:
    gate_up, down = weights_of(num_experts, dim, inter)
    x, ids, weights = tokens_of(num_tokens, dim, num_experts, top_k)
    out = CpuExperts.of(gate_up, down).forward(x, ids, weights)
    assert_close(out, fused_experts_reference(x, gate_up, down, ids, weights), RELATIVE_TOLERANCE)


@pytest.mark.parametrize("num_tokens", [4, 24])
def test_pairs_without_an_expert_add_nothing(num_tokens: int) -> None:
    gate_up, down = weights_of(8, 64, 32)
    x, ids, weights = tokens_of(num_tokens, 64, 8, 4)
    ids[1], ids[2, 0] = -1, -1
    out = CpuExperts.of(gate_up, down).forward(x, ids, weights)
    assert_close(out, fused_experts_reference(x, gate_up, down, ids, weights), RELATIVE_TOLERANCE)
    assert not out[1].any()
    assert not CpuExperts.of(gate_up, down).forward(x, torch.full_like(ids, -1), weights).any()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_experts_give_the_same_bits_in_parts(num_threads: int) -> None:
    """Each part has some of the experts and a piece of their width."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        gate_up, down = weights_of(17, 384, 72)
        x, ids, weights = tokens_of(64, 384, 17, 5)
        whole = CpuExperts.of(gate_up, down, [40, 72]).forward(x, ids, weights)
        total = torch.zeros_like(whole)
        for first, last in ((9, 17), (0, 9)):
            own_ids = torch.where((ids >= first) & (ids < last), ids - first, -1)
            for start, end in ((40, 72), (0, 40)):
                own_gate_up = torch.cat([half[first:last, start:end] for half in gate_up.chunk(2, dim=1)], dim=1)
                part = CpuExperts.of(own_gate_up, down[first:last, :, start:end])
                total += part.forward(x, own_ids, weights)
        assert_bitwise_equal(total.float(), whole.float())
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("dim", "inter"), [(384, 128), (64, 32), (200, 72)])
def test_a_tokens_bits_depend_on_nothing_else(dim: int, inter: int, num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        experts = CpuExperts.of(*weights_of(17, dim, inter))
        x, ids, weights = tokens_of(64, dim, 17, 5)
        many = experts.forward(x, ids, weights)
        for count in (1, 2, 4, 5, 8, 12, 16, 20, 33):
            assert_bitwise_equal(experts.forward(x[:count], ids[:count], weights[:count]), many[:count])
        alone = torch.full((4, 5), -1, dtype=torch.int32)
        alone[0] = ids[9]
        padded = experts.forward(x[9:13], alone, weights[9:13])
        assert_bitwise_equal(padded[:1], many[9:10])
    finally:
        torch.set_num_threads(before)
