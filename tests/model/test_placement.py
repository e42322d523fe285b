from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import ConfigError
from app.model.placement import ExpertPlacement, LayerPlacement


def test_even_spreads_neighbours() -> None:
    assert LayerPlacement.even(8, 3).experts == ((0, 1), (2, 3, 4), (5, 6, 7))


def test_a_hot_expert_lies_on_several_ranks_and_rows_take_turns() -> None:
    placement = LayerPlacement.balanced([90.0, 10.0, 10.0, 10.0], num_ranks=2, num_copies=2)
    assert placement.ranks_of(0) == [0, 1]
    owners = placement.owners()
    assert sorted(owners[:, 0].tolist()) == [0, 1]
    for rank in range(2):
        slots = placement.slots(rank)
        assert ((slots >= 0) == (owners == rank)).all()
        experts = placement.experts[rank]
        assert all(experts[slot] == expert for line in slots.tolist() for expert, slot in enumerate(line) if slot >= 0)


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=24), st.integers(1, 5), st.integers(0, 10))
def test_balanced_holds_every_expert_and_evens_out(loads: list[float], num_ranks: int, num_copies: int) -> None:
    placement = LayerPlacement.balanced(loads, num_ranks, num_copies)
    assert {expert for experts in placement.experts for expert in experts} == set(range(len(loads)))
    assert all(len(set(experts)) == len(experts) for experts in placement.experts)
    assert max(map(len, placement.experts)) <= -(-(len(loads) + num_copies) // num_ranks)
    assert 1.0 - 1e-9 <= placement.imbalance(loads) <= num_ranks + 1e-9


def test_copies_lower_the_imbalance() -> None:
    loads = [300.0, 50.0, 20.0, 10.0, 5.0, 5.0, 5.0, 5.0]
    even = LayerPlacement.even(8, 2).imbalance(loads)
    moved = LayerPlacement.balanced(loads, 2, 0).imbalance(loads)
    copied = LayerPlacement.balanced(loads, 2, 2).imbalance(loads)
    assert copied < 1.1 < 1.4 < moved <= even


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    placement = ExpertPlacement.balanced({3: [9.0, 1.0, 1.0, 1.0]}, 4, 2, num_copies=1)
    placement.write(path)
    assert ExpertPlacement.read(path, 4, 2) == placement
    assert placement.layer(0) == LayerPlacement.even(4, 2)


@pytest.mark.parametrize(
    "layers", [{"1": [[0, 1], [2]]}, {"1": [[0, 1, 2, 3]]}, {"1": [[0, 1, 1], [2, 3]]}, {"1": 5}, {"x": []}]
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, layers: object) -> None:
    path = tmp_path / "placement.json"
    path.write_text(json.dumps({"layers": layers}))
    with pytest.raises(ConfigError, match="expert_placement"):
        ExpertPlacement.read(path, 4, 2)
    with pytest.raises(ConfigError, match="expert_placement"):
        ExpertPlacement.read(tmp_path / "none.json", 4, 2)
