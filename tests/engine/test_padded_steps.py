"""Steps padded to a graph's shape, through the model on a CPU: the logits of the same steps unpadded, on one rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from app.cache.layout import CacheLayout
from app.engine.plan import StepPlan, to_model_input
from app.engine.step_buffers import StepBuffers, StepShape
from app.model import spread_experts
from app.model.config import ModelConfig
from app.model.parallel import Ranks
from app.model.sharding import Shard
from app.model.transformer import Transformer
from app.model.weights import load_weights
from tests.checkpoints import save_random_checkpoint
from tests.model.local_ranks import run_ranks

BLOCK_SIZE, NUM_BLOCKS = 4, 24
CPU = torch.device("cpu")
MAX_LOGIT_DIFFERENCE = 1e-4  # over expanded keys: sums in another order
# Sequence -> new tokens, context length: prompts in a shape of which two ranks have 8 rows and 8 sequences each, then
# decodes beside prompts, then decodes.
STEPS = (
    {0: (1, 1), 1: (6, 6), 2: (5, 5)},
    {0: (1, 2), 1: (1, 7), 3: (9, 9), 2: (3, 8)},
    {seq: (1, end) for seq, end in ((0, 3), (1, 8), (3, 10), (2, 9))},
)
SHAPES = (StepShape(16, 8), StepShape(36, 10, num_decodes=4, num_keys=72), StepShape.of_decodes(6))


def plan_of(step: dict[int, tuple[int, int]]) -> StepPlan:
    tables = np.arange(NUM_BLOCKS, dtype=np.int32).reshape(4, -1)[:, ::-1]
    tokens = [(31 * seq + 7 * at + 3) % 90 for seq, (count, end) in step.items() for at in range(end - count, end)]
    counts, lens = (np.array(numbers, dtype=np.int32) for numbers in zip(*step.values(), strict=True))
    return StepPlan(counts, lens, np.array(tokens, dtype=np.int32), tables[list(step)])


def logits_of(rank: int, ranks: Ranks, folder: Path, *, is_absorbed: bool, is_padded: bool) -> torch.Tensor:
    """Of all steps; none on ranks after the first."""
    config, num_parts = ModelConfig.from_folder(folder), ranks.expert.size
    shard = Shard.of(config, rank, 1, num_parts)
    weights = load_weights(folder, config, dtype=torch.float32, device=CPU, shard=shard)
    model = Transformer(
        config, weights, device=CPU, dtype=torch.float32, absorbed_prefill=is_absorbed, ranks=ranks
    )  # fmt: skip
    cache = replace(CacheLayout.of(config, torch.float32), block_size=BLOCK_SIZE).allocate(NUM_BLOCKS, CPU)
    buffers = StepBuffers(
        36, 10, max_blocks=8, block_size=BLOCK_SIZE, device=CPU, part=ranks.expert.rank, num_parts=num_parts
    )
    logits = []
    for step, shape in zip(STEPS, SHAPES, strict=True):
        plan = plan_of(step)
        inputs = to_model_input(plan, BLOCK_SIZE, CPU, part=ranks.expert.rank, num_parts=num_parts)
        if is_padded:
            buffers.fill(plan, shape)
            inputs = buffers.inputs(shape)
        logits.append(model.forward(inputs, cache)[: len(step)])
    return torch.cat(logits)


@pytest.mark.parametrize("is_absorbed", [True, False], ids=["absorbed", "expanded"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_padding_changes_no_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, is_absorbed: bool
) -> None:
    """To the bit where a CPU promises it."""
    monkeypatch.setitem(spread_experts.MAX_PADDED_ROWS, "cpu", 64)
    folder = save_random_checkpoint(tmp_path, "v3", num_hidden_layers=2)
    run = partial(logits_of, folder=folder, is_absorbed=is_absorbed)
    [expected] = run_ranks(1, 1, partial(run, is_padded=False))
    found, *others = run_ranks(1, num_ranks, partial(run, is_padded=True))
    assert expected.isfinite().all() and not any(len(logits) for logits in others)
    if is_absorbed:
        assert torch.equal(found, expected)
    else:
        assert (found - expected).abs().max() <= MAX_LOGIT_DIFFERENCE
