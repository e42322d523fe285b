from __future__ import annotations

import pytest
import torch

from kernels.expert_placement import place_experts, place_experts_reference
from tests.kernels.cases import Target, assert_bitwise_equal, generator


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "period"), [(0, 4, 2, 1), (1, 1, 1, 1), (9, 8, 3, 2), (200, 64, 6, 6)]
)
def test_matches_reference(num_tokens: int, num_experts: int, top_k: int, period: int, target: Target) -> None:
    random = generator(num_tokens)
    ids = torch.randint(-1, num_experts, (num_tokens, top_k), generator=random, dtype=torch.int32)
    slots = torch.randint(-1, 3, (num_tokens,), generator=random)
    table = torch.randint(-1, 5, (period, num_experts), generator=random, dtype=torch.int32)
    counts = torch.arange(num_experts)
    places, new_counts = place_experts_reference(ids, slots, table, counts)
    on_target = target.place(counts.clone())
    found = place_experts(*map(target.place, (ids, slots, table)), on_target, backend=target.backend)
    assert_bitwise_equal(found.cpu(), places)
    assert_bitwise_equal(on_target.cpu(), new_counts)


def test_rows_take_turns_and_padding_is_not_counted() -> None:
    ids = torch.tensor([[1, 0], [1, 0], [1, 0], [0, 1]], dtype=torch.int32)
    table = torch.tensor([[5, 6], [5, 7]], dtype=torch.int32)
    counts = torch.zeros(2, dtype=torch.int64)
    places = place_experts(ids, torch.tensor([0, 3, 1, -1]), table, counts)
    assert places.tolist() == [[6, 5], [7, 5], [6, 5], [-1, -1]]
    assert counts.tolist() == [3, 3]


def test_wrong_arguments_are_named() -> None:
    ids, slots = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    table, counts = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="slots"):
        place_experts(ids, slots[:1], table, counts)
    with pytest.raises(ValueError, match="counts"):
        place_experts(ids, slots, table, counts[:3])
    with pytest.raises(ValueError, match="ids"):
        place_experts(ids.long(), slots, table, counts)
