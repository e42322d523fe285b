"""What a graph reads is what the eager step would be given, padded."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.engine.graphs import EMPTY_PLAN, batch_sizes, prompt_shapes
from app.engine.plan import StepPlan, put_sampled, to_model_input
from app.engine.step_buffers import StepBuffers, StepShape, context_products, first_holding
from app.model.parallel import Group

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def plan_of(counts: list[int], context_lens: list[int]) -> StepPlan:
    width = max(-(-length // BLOCK_SIZE) for length in context_lens)
    tables = np.random.default_rng(7).permutation(len(counts) * width).reshape(len(counts), width)
    return StepPlan(
        num_new_tokens=np.array(counts, dtype=np.int32),
        context_lens=np.array(context_lens, dtype=np.int32),
        token_ids=np.arange(100, 100 + sum(counts), dtype=np.int32),
        block_tables=tables.astype(np.int32),
    )


def make_buffers(part: int = 0, num_parts: int = 1) -> StepBuffers:
    return StepBuffers(64, 16, max_blocks=12, block_size=BLOCK_SIZE, device=CPU, part=part, num_parts=num_parts)


@pytest.mark.parametrize("shape", [StepShape(8, 4), StepShape(64, 16)], ids=str)
def test_a_mixed_step_is_the_eager_steps_input_padded(shape: StepShape) -> None:
    buffers = make_buffers()
    buffers.fill(plan_of([1] * 4, [40, 41, 42, 43]), StepShape.of_decodes(4))  # what a smaller step leaves behind
    plan = plan_of([1, 5, 2], [9, 13, 2])
    buffers.fill(plan, shape)
    inputs, expected = buffers.inputs(shape), to_model_input(plan, BLOCK_SIZE, CPU)
    rows, seqs = 8, 3
    for name in ("token_ids", "positions", "slots"):
        assert getattr(inputs, name)[:rows].tolist() == getattr(expected, name)[:rows].tolist(), name
    for name in ("context_lens", "logit_rows"):
        assert getattr(inputs, name)[:seqs].tolist() == getattr(expected, name).tolist(), name
    assert inputs.query_starts.tolist() == [0, 1, 6] + [8] * (shape.num_seqs - 2)
    assert inputs.block_tables[:seqs, : plan.block_tables.shape[1]].tolist() == plan.block_tables.tolist()
    assert inputs.slots[rows:].tolist() == [-1] * (shape.num_rows - rows)
    assert inputs.context_lens[seqs:].tolist() == [0] * (shape.num_seqs - seqs)
    assert inputs.host_query_starts is None and inputs.num_decodes == 0


def test_a_step_of_decodes_has_a_row_per_sequence() -> None:
    buffers, shape = make_buffers(), StepShape.of_decodes(4)
    buffers.fill(plan_of([1, 1, 1], [9, 13, 2]), shape)
    inputs = buffers.inputs(shape)
    assert inputs.num_decodes == 4 and inputs.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert inputs.logit_rows.tolist() == [0, 1, 2, 0]
    assert inputs.positions.tolist() == [8, 12, 1, 0] and inputs.context_lens.tolist() == [9, 13, 2, 0]
    put_sampled(buffers.token_ids(3), torch.arange(1000, 1200), Group())
    assert inputs.token_ids.tolist() == [1100, 1101, 1102, 0], "rows of the step before became its tokens"


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize(
    ("counts", "context_lens", "shape"),
    [
        pytest.param([1, 5, 2], [9, 13, 2], StepShape(8, 4), id="prompt-cut"),
        pytest.param([1] * 6, [9, 3, 4, 1, 40, 7], StepShape(8, 8), id="decodes"),
        pytest.param([3], [30], StepShape(8, 4), id="second-part-empty"),
    ],
)
def test_a_part_of_a_step_is_the_eager_steps_part(
    counts: list[int], context_lens: list[int], shape: StepShape, part: int
) -> None:
    plan = plan_of(counts, context_lens)
    buffers = make_buffers(part, 2)
    buffers.fill(plan_of([1] * 4, [40, 41, 42, 43]), StepShape(4, 4))
    buffers.fill(plan, shape)
    inputs, expected = buffers.inputs(shape), to_model_input(plan, BLOCK_SIZE, CPU, part=part, num_parts=2)
    assert inputs.shared is not None and expected.shared is not None
    num_rows, num_seqs = len(expected.token_ids), len(expected.context_lens)
    for name in ("token_ids", "positions", "slots"):
        assert getattr(inputs, name)[:num_rows].tolist() == getattr(expected, name).tolist(), name
        whole = getattr(expected.shared, name)
        assert getattr(inputs.shared, name)[: sum(counts)].tolist() == whole[: sum(counts)].tolist(), name
    assert inputs.shared.slots[sum(counts) :].tolist() == [-1] * (8 - sum(counts))
    assert inputs.context_lens.tolist()[:num_seqs] == expected.context_lens.tolist()
    assert not inputs.context_lens[num_seqs:].any()
    assert inputs.query_starts[: num_seqs + 1].tolist() == expected.query_starts.tolist()
    width = plan.block_tables.shape[1]
    assert inputs.block_tables[:num_seqs, :width].tolist() == expected.block_tables.tolist()
    assert inputs.logit_rows.tolist() == expected.logit_rows.tolist() + [-1] * (shape.num_seqs - len(counts))


def test_an_empty_plan_is_all_padding() -> None:
    buffers, shape = make_buffers(), StepShape(8, 4)
    buffers.fill(plan_of([1, 5, 2], [9, 13, 2]), shape)
    buffers.fill(EMPTY_PLAN, shape)
    inputs = buffers.inputs(shape)
    assert inputs.slots.tolist() == [-1] * 8
    assert inputs.query_starts.tolist() == [0] * 5 and inputs.context_lens.tolist() == [0] * 4


@pytest.mark.parametrize("limit", [1, 3, 16, 33, 64, 100, 512])
def test_padded_batch_sizes_cover_every_count_up_to_the_limit(limit: int) -> None:
    sizes = batch_sizes(limit)
    assert sizes == tuple(sorted(set(sizes))) and sizes[-1] == limit
    assert all(any(count <= size < count + 32 for size in sizes) for count in range(1, limit + 1))


def test_decodes_beside_expanded_prompts_have_rows_of_their_own() -> None:
    buffers, shape = make_buffers(), StepShape(24, 7, num_decodes=4, num_keys=40)
    plan = plan_of([1, 1, 5, 2], [9, 4, 13, 2])
    buffers.fill(plan, shape)
    inputs = buffers.inputs(shape)
    assert inputs.token_ids.tolist() == [100, 101, 0, 0, *range(102, 109)] + [0] * 13
    assert inputs.positions[:11].tolist() == [8, 3, 0, 0, 8, 9, 10, 11, 12, 0, 1]
    assert [row for row, slot in enumerate(inputs.slots.tolist()) if slot >= 0] == [0, 1, *range(4, 11)]
    assert inputs.context_lens.tolist() == [9, 4, 0, 0, 13, 2, 0]
    assert inputs.query_starts.tolist() == [0, 1, 2, 3, 4, 9, 11, 11]
    assert inputs.logit_rows.tolist() == [0, 1, 8, 10, 0, 0, 0], "in the order of the plan"
    assert inputs.block_tables[4, :4].tolist() == plan.block_tables[2].tolist()
    assert (inputs.num_decodes, inputs.num_keys) == (4, 40)


@pytest.mark.parametrize("num_parts", [2, 3])
def test_each_part_has_its_share_of_decodes_and_of_prompts(num_parts: int) -> None:
    shape = StepShape(30, 9, num_decodes=6, num_keys=60)
    plan = plan_of([1, 1, 1, 1, 5, 8, 2], [9, 4, 30, 7, 13, 8, 2])
    whole, front, rest = to_model_input(plan, BLOCK_SIZE, CPU), 6 // num_parts, 24 // num_parts
    found: dict[int, list[int]] = {}  # row of the plan -> how far it sees, its block table
    logits: dict[int, int] = {}
    for part in range(num_parts):
        buffers = make_buffers(part, num_parts)
        buffers.fill(plan_of([1] * 4, [40, 41, 42, 43]), StepShape(4, 4))
        buffers.fill(plan, shape)
        inputs = buffers.inputs(shape)
        assert inputs.shared is not None and (inputs.num_decodes, inputs.num_keys) == (front, 60)
        assert len(inputs.token_ids) == front + rest and not (inputs.slots + 1).any()
        own = slice(part * (front + rest), (part + 1) * (front + rest))
        assert torch.equal(inputs.token_ids, inputs.shared.token_ids[own])
        assert torch.equal(inputs.positions, inputs.shared.positions[own])
        starts = inputs.query_starts.tolist()
        assert starts[: front + 1] == list(range(front + 1)), "a row for each decode, whether it is there or not"
        for index, length in enumerate(inputs.context_lens.tolist()):
            for row in range(starts[index], starts[index + 1]) if length else ():
                assert (row < front) == (inputs.token_ids[row] < 104), "decodes come first"
                assert inputs.positions[row] == length - (starts[index + 1] - row)
                slot = int(inputs.shared.slots[own][row])
                assert slot // BLOCK_SIZE == inputs.block_tables[index, int(inputs.positions[row]) // BLOCK_SIZE]
                found[int(inputs.token_ids[row]) - 100] = [int(inputs.positions[row]), slot]
        for sequence, row in enumerate(inputs.logit_rows.tolist()):
            if row >= 0:
                logits[sequence] = int(inputs.token_ids[row]) - 100
    num_rows = len(plan.token_ids)
    expected = zip(whole.positions[:num_rows].tolist(), whole.slots[:num_rows].tolist(), strict=True)
    assert [found[row] for row in range(num_rows)] == [list(row) for row in expected]
    assert [logits[sequence] for sequence in range(7)] == whole.logit_rows.tolist()


def test_prompt_shapes_hold_the_largest_step_up_to_their_bound() -> None:
    assert [shape.num_rows for shape in prompt_shapes(8, 300)] == [64, 128, 256, 520]
    assert prompt_shapes(512, 16384)[-1] == StepShape(1152, 144, 128, num_keys=2048)
    assert prompt_shapes(1, 32) == (StepShape(64, 1),)
    shapes = prompt_shapes(512, 16384)
    assert first_holding(shapes, plan_of([1] * 40 + [30], [5] * 40 + [30])) == StepShape(128, 64), "41 sequences"
    assert first_holding(shapes, plan_of([1] * 128 + [512], [5] * 128 + [1024])) == shapes[3]
    assert first_holding(shapes, plan_of([1] * 129 + [512], [5] * 129 + [512])) is None, "too many decodes"
    assert first_holding(shapes, plan_of([512], [1025])) == shapes[4], "too many keys"
    assert first_holding(shapes, plan_of([1025], [1025])) is None


def test_context_products_count_prompts_only() -> None:
    assert context_products(plan_of([1, 5, 2], [900, 13, 20])) == 5 * 13 + 2 * 20
