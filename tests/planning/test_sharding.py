"""The cost model of shardings: the published sizes of the models, conservation, and what the command prints."""

from __future__ import annotations

import pytest

from app import cli
from app.planning.command import sharding_lines
from app.planning.sharding import SHAPES, Accelerator, ModelShape, rank_weight_bytes, sharding_cost, shardings

DEVICE = Accelerator()


def params(shape: ModelShape, num_experts: int) -> float:
    dense = shape.head_params + shape.other_params + shape.mlp_params
    return dense + shape.num_moe_layers * num_experts * shape.expert_params


@pytest.mark.parametrize(
    ("name", "total", "active", "kv_bytes"),
    [
        ("deepseek-v3", 671e9, 37e9, 70272),
        ("deepseek-v4-flash", 284e9, 13e9, 6880),
        ("deepseek-v4-pro", 1.6e12, 49e9, 9848),
    ],
)
def test_shapes_add_up_to_the_published_sizes(name: str, total: float, active: float, kv_bytes: int) -> None:
    shape = SHAPES[name]
    assert params(shape, shape.num_experts) == pytest.approx(total, rel=0.02)
    assert params(shape, shape.top_k) == pytest.approx(active, rel=0.06)
    assert shape.kv_bytes_per_token == kv_bytes


def test_shardings_divide_heads_and_experts_and_keep_tensor_groups_in_a_node() -> None:
    assert list(shardings(SHAPES["deepseek-v3"], 16, DEVICE)) == [(1, 16), (2, 8), (4, 4), (8, 2)]
    assert list(shardings(SHAPES["deepseek-v4-pro"], 24, DEVICE)) == [(1, 24), (2, 12), (4, 6), (8, 3)]
    assert list(shardings(SHAPES["deepseek-v3"], 7, DEVICE)) == []


def test_weights_of_all_ranks_hold_each_expert_once_and_the_rest_as_often_as_it_is_needed() -> None:
    shape = SHAPES["deepseek-v3"]
    experts = shape.num_moe_layers * shape.num_experts * shape.expert_params * shape.expert_weight_bytes
    for tensor, expert in shardings(shape, 16, DEVICE):
        dense = (shape.head_params + shape.mlp_params) * expert + shape.other_params * tensor * expert
        assert 16 * rank_weight_bytes(shape, tensor, expert) == pytest.approx(experts + dense * shape.weight_bytes)


def test_one_rank_exchanges_nothing_and_more_ranks_compute_less() -> None:
    shape = SHAPES["deepseek-v4-flash"]
    costs = [sharding_cost(shape, *at, batch=32, context=4096, device=DEVICE) for at in ((1, 1), (2, 1), (1, 2))]
    alone, tensor, expert = costs
    assert alone.all_reduce_bytes == alone.all_to_all_bytes == alone.collective_s == 0.0
    assert tensor.all_to_all_bytes == expert.all_reduce_bytes == 0.0
    # Ring: each rank sends half of the sum's size twice; two sums a layer of [32, hidden] in bf16.
    assert tensor.all_reduce_bytes == 2 * shape.num_layers * 32 * shape.hidden_size * 2
    # Half of the rows are here: to the other group's experts and back, and their cache entries, in bf16.
    rows = 2 * shape.num_moe_layers * 16 * shape.hidden_size * 2
    assert expert.all_to_all_bytes == rows + shape.num_layers * 16 * shape.entry_bytes
    assert alone.compute_s > max(tensor.compute_s, expert.compute_s) > alone.compute_s / 2


def test_what_does_not_fit_is_never_chosen() -> None:
    shape = SHAPES["deepseek-v4-pro"]
    costs = [sharding_cost(shape, *at, batch=8, context=1024, device=DEVICE) for at in shardings(shape, 8, DEVICE)]
    assert not costs[0].fits and costs[-1].fits
    lines = sharding_lines("deepseek-v4-pro", 8, batch=8, context=1024)
    assert "no room" in lines[0] and not lines[0].endswith("*")
    assert not any(line.endswith("*") for line in sharding_lines("deepseek-v4-pro", 8, batch=4096, context=8192))


def test_the_command_prints_a_table_per_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "sharding", "--model", "deepseek-v3", "--accelerators", "8", "--batch", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "deepseek-v3, 16 sequences of 8192 tokens"
    rows = [line for line in lines if " x " in line and line.lstrip()[0].isdigit()]
    assert len(rows) == 4 and sum(row.endswith("*") for row in rows) == 1
    assert all(len(row.removesuffix(" *")) == len(lines[1]) for row in rows)


def test_two_nodes_are_one_replica_or_two() -> None:
    lines = sharding_lines("deepseek-v3", 16, batch=64, context=1024)
    assert [line.split()[1] for line in lines] == ["1"] * 4 + ["2"] * 4
    assert all(line.startswith("   16 ") for line in lines)
