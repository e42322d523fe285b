from __future__ import annotations

import pytest
import torch

from app.engine.batch import Batch, to_model_input
from app.engine.graphs import batch_sizes
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
    inputs = to_model_input(batch, block_size=4, device=torch.device("cpu"))

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
    inputs = to_model_input(batch, block_size=4, device=torch.device("cpu"))
    assert len(inputs.token_ids) == len(inputs.positions) == len(inputs.slots) == rows
    assert inputs.slots[num_tokens:].tolist() == [-1] * (rows - num_tokens)


def test_split_keeps_the_order() -> None:
    batch = Batch.of([(sequence(11, 2, [0]), 6), (sequence(5, 4, [1]), 1), (sequence(6, 5, [2]), 1)])
    decodes, prefills = batch.split()
    assert (decodes.num_new_tokens, prefills.num_new_tokens) == ((1, 1), (6,))
    assert decodes.sequences + prefills.sequences == batch.sequences


@pytest.mark.parametrize("limit", [1, 3, 16, 33, 64, 100, 512])
def test_padded_batch_sizes_cover_every_count_up_to_the_limit(limit: int) -> None:
    sizes = batch_sizes(limit)
    assert sizes == tuple(sorted(set(sizes))) and sizes[-1] == limit
    assert all(any(count <= size < count + 32 for size in sizes) for count in range(1, limit + 1))
