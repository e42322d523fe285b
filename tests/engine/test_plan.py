from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from app.engine.batch import Batch
from app.engine.plan import LONG_CHUNK, StepPlan, to_model_input, warm_up_plans
from app.engine.sequence import Sequence
from app.protocol import GenerateRequest, SamplingParams
from kernels.checks import ROW_TILE


def sequence(num_prompt: int, num_computed: int, block_ids: list[int]) -> Sequence:
    request = GenerateRequest("r", tuple(range(100, 100 + num_prompt)), SamplingParams())
    seq = Sequence(request, b"", arrival_s=0.0)
    seq.num_computed_tokens, seq.block_ids = num_computed, block_ids
    return seq


def test_the_arrays_of_a_mixed_batch() -> None:
    prefill, decode = sequence(11, 2, [5, 9, 7]), sequence(5, 4, [3, 1])
    batch = Batch.of([(prefill, 6), (decode, 1)])
    inputs = to_model_input(StepPlan.of(batch), block_size=4, device=torch.device("cpu"))

    assert batch.sequences == (decode, prefill)
    assert inputs.token_ids.tolist() == [104, *range(102, 108), 0]
    assert inputs.positions.tolist() == [4, 2, 3, 4, 5, 6, 7, 0]
    assert inputs.slots.tolist() == [1 * 4 + 0, 5 * 4 + 2, 5 * 4 + 3, 9 * 4, 9 * 4 + 1, 9 * 4 + 2, 9 * 4 + 3, -1]
    assert inputs.query_starts.tolist() == [0, 1, 7] == list(inputs.host_query_starts)
    assert inputs.context_lens.tolist() == [5, 8] == list(inputs.host_context_lens)
    assert inputs.block_tables.tolist() == [[3, 1, 0], [5, 9, 7]]
    assert inputs.logit_rows.tolist() == [0, 6]
    assert inputs.num_decodes == 1
    assert batch.samples == [0], "the prefill has three tokens left after this step"


@pytest.mark.parametrize(("num_tokens", "rows"), [(1, ROW_TILE), (ROW_TILE, ROW_TILE), (ROW_TILE + 1, 2 * ROW_TILE)])
def test_rows_are_padded_to_the_row_tile(num_tokens: int, rows: int) -> None:
    batch = Batch.of([(sequence(num_tokens, 0, [0, 1, 2]), num_tokens)])
    inputs = to_model_input(StepPlan.of(batch), block_size=4, device=torch.device("cpu"))
    assert len(inputs.token_ids) == len(inputs.positions) == len(inputs.slots) == rows
    assert inputs.slots[num_tokens:].tolist() == [-1] * (rows - num_tokens)


def assert_same(a: StepPlan, b: StepPlan) -> None:
    for name in ("num_new_tokens", "context_lens", "token_ids", "block_tables"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    assert a.num_pending == b.num_pending


def test_a_plan_survives_its_way_in_words() -> None:
    mixed = Batch.of([(sequence(11, 2, [5, 9, 7]), 6), (sequence(5, 4, [3, 1]), 1)])
    ahead = Batch((sequence(5, 4, [3, 1]),), (1,), ([3, 1],), previous_rows=(2,))
    joined = Batch.of([(sequence(9, 0, [6, 8, 2]), 9)]).after(ahead.sequences, ahead.previous_rows)
    for batch in (mixed, ahead, joined, Batch((), (), ())):
        plan = StepPlan.of(batch)
        padded = np.pad(plan.pack(), (0, 5), constant_values=-7)
        assert_same(StepPlan.unpack(padded), plan)
    assert StepPlan.of(ahead).token_ids.tolist() == [2]
    assert StepPlan.of(ahead).context_lens.tolist() == [6]
    plan = StepPlan.of(joined)
    assert plan.num_pending == 1 and plan.context_lens.tolist() == [6, 9]
    assert plan.token_ids.tolist() == [2, *joined.sequences[1].token_ids]


@pytest.mark.parametrize("num_parts", [2, 3, 5])
def test_the_parts_of_a_step_are_the_whole_step(num_parts: int) -> None:
    """Two decodes, a chunk of 7 and one of 10, cut anywhere; the last parts may be empty."""
    scheduled = [(sequence(30, 4, [1, 2, 3, 4, 5]), 7), (sequence(25, 9, [6, 7, 8, 9, 10]), 10)]
    scheduled += [(sequence(5, 4, [11, 12]), 1), (sequence(8, 7, [13, 14]), 1)]
    plan = StepPlan.of(Batch.of(scheduled))
    whole = to_model_input(plan, 4, torch.device("cpu"))
    rows = list(zip(whole.token_ids.tolist(), whole.positions.tolist(), strict=True))[:19]
    found, logit_rows = [], torch.full((4,), -1)
    for part in range(num_parts):
        inputs = to_model_input(plan, 4, torch.device("cpu"), part=part, num_parts=num_parts)
        assert inputs.shared is not None
        assert inputs.shared.slots[:19].tolist() == whole.slots[:19].tolist()
        assert set(inputs.shared.slots[19:].tolist()) <= {-1} >= set(inputs.slots.tolist())
        size = len(inputs.token_ids)
        assert inputs.shared.positions[part * size :][:size].tolist() == inputs.positions.tolist()
        starts = inputs.host_query_starts
        assert len(starts) == len(inputs.host_context_lens) + 1
        for (start, end), context_len in zip(pairwise(starts), inputs.host_context_lens, strict=True):
            assert start < end and inputs.positions[end - 1] + 1 == context_len
        found += list(zip(inputs.token_ids.tolist(), inputs.positions.tolist(), strict=True))[: starts[-1]]
        lengths = [end - start for start, end in pairwise(starts)]
        assert lengths[: inputs.num_decodes] == [1] * inputs.num_decodes != lengths[: inputs.num_decodes + 1]
        mine = inputs.logit_rows >= 0
        logit_rows[mine] = inputs.logit_rows[mine] + part * size
    assert found == rows
    assert logit_rows.tolist() == whole.logit_rows.tolist()


def test_warm_up_steps_are_ones_that_the_model_can_run() -> None:
    plans = warm_up_plans(3000, 5000, 64)
    assert [len(plan.token_ids) for plan in plans] == [3000, 8, 32, 128, 512, 2048]
    assert [plan.num_decodes for plan in plans] == [1, 1, 2, 4, 8, 16]
    assert plans[0].context_lens.tolist() == [1, 5000, 3000 - LONG_CHUNK - 1]
    for plan in plans:
        inputs = to_model_input(plan, 64, torch.device("cpu"))
        assert inputs.slots.max() < 64 and inputs.positions.max() == plan.context_lens.max() - 1


@pytest.mark.parametrize("num_parts", [2, 3])
def test_every_part_warms_up_on_the_longest_context(num_parts: int) -> None:
    *_, plan = warm_up_plans(8192, 131_072, 64, num_parts=num_parts)
    size = len(plan.token_ids) // num_parts
    parts = [plan.cut(part * size, (part + 1) * size) for part in range(num_parts)]
    assert [part.num_new_tokens.tolist() for part in parts] == [[LONG_CHUNK]] * num_parts
    assert parts[0].context_lens.tolist() == [131_072 - (num_parts - 1) * LONG_CHUNK]
    assert parts[-1].context_lens.tolist() == [131_072]


def test_the_first_warm_up_step_reaches_both_limits_however_small() -> None:
    for max_tokens, max_context in ((1, 1), (5, 4), (200, 4096), (1025, 1025), (1026, 1026), (4096, 2048)):
        plan, *_ = warm_up_plans(max_tokens, max_context, 64)
        assert len(plan.token_ids) == max(2, max_tokens)
        assert plan.context_lens.max() >= max_context
        assert (plan.context_lens >= plan.num_new_tokens).all()
        to_model_input(plan, 64, torch.device("cpu"))
