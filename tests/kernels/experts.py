"""What the tests of both kinds of experts share: cases by their choices, and the check at served sizes on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.kernels.cases import assert_bitwise_equal, assert_close


@dataclass(frozen=True)
class Case:
    name: str
    num_tokens: int
    top_k: int = 2
    num_experts: int = 5
    dim: int = 128
    inter: int = 128
    ids: tuple[tuple[int, ...], ...] | None = None  # None: random, distinct per token

    def chosen(self, random: torch.Generator) -> torch.Tensor:
        """[num_tokens, k] int32"""
        if self.ids is not None:
            return torch.tensor(self.ids, dtype=torch.int32)
        return torch.rand(self.num_tokens, self.num_experts, generator=random).topk(self.top_k).indices.int()


def check_repeats_and_replay(
    run: Callable[[], torch.Tensor],
    reference: Callable[[], torch.Tensor],
    token_inputs: tuple[torch.Tensor, ...],
    tolerance: float,
) -> None:
    """Right, the same 20 times, and right when a graph is replayed over the tokens in another order."""
    out = run()
    assert_close(out, reference(), tolerance)
    for _ in range(20):
        assert_bitwise_equal(run(), out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for tensor in token_inputs:
        tensor.copy_(tensor.flip(0))
    graph.replay()
    assert_close(captured, reference(), tolerance)
