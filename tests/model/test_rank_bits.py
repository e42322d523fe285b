"""Under `invariance`, as on CUDA, fp32 models on Triton give the bits of one rank, however many ranks there are."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from app.cache.layout import CacheLayout
from app.engine.plan import StepPlan, to_model_input
from app.model import spread_experts
from app.model.config import ModelConfig
from app.model.parallel import Ranks
from app.model.sharding import Shard
from app.model.transformer import Transformer
from app.model.weights import load_weights
from tests.checkpoints import VOCAB_SIZE, save_random_checkpoint
from tests.model.local_ranks import run_ranks

NUM_BLOCKS, BLOCK_SIZE = 4, 64
# A chunk beside a decode, then both sequences' decodes: new tokens and context of each.
STEPS = (((1, 1), (11, 11)), ((1, 2), (1, 12)))


pytestmark = pytest.mark.usefixtures("invariant")


@pytest.fixture(
    params=[
        pytest.param(
            "cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU"),
        ),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def plan_of(work: tuple[tuple[int, int], ...]) -> StepPlan:
    """Sequence i lies in blocks 2 i and 2 i + 1."""
    counts, lens = (np.array(column, dtype=np.int32) for column in zip(*work, strict=True))
    tables = np.arange(2 * len(work), dtype=np.int32).reshape(-1, 2)
    positions = [range(length - count, length) for count, length in work]
    tokens = [(31 * index + 7 * at + 3) % VOCAB_SIZE for index, span in enumerate(positions) for at in span]
    return StepPlan(counts, lens, np.array(tokens, dtype=np.int32), tables)


def run_rank(
    rank: int, ranks: Ranks, folder: Path, device: torch.device, size: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of all steps and the counts of experts chosen."""
    config = ModelConfig.from_folder(folder)
    shard = Shard.of(config, rank, *size)
    weights = load_weights(folder, config, dtype=torch.float32, device=device, backend="triton", shard=shard)
    model = Transformer(
        config, weights, device=device, dtype=torch.float32, absorbed_prefill=True, backend="triton", ranks=ranks
    )
    cache = CacheLayout.of(config, torch.float32).allocate(NUM_BLOCKS, device)
    part = {"part": ranks.expert.rank, "num_parts": ranks.expert.size}
    logits = [model.forward(to_model_input(plan_of(work), BLOCK_SIZE, device, **part), cache) for work in STEPS]
    return torch.cat(logits).clone(), model.expert_counts.clone()


@pytest.mark.parametrize(
    ("family", "tensor", "expert", "padded_rows"),
    [
        ("v2_lite", 2, 1, 0),
        ("v2_lite", 1, 2, 0),
        pytest.param("v3", 2, 2, 64, marks=pytest.mark.full),
        pytest.param("v2", 2, 2, 0, marks=pytest.mark.full),
        pytest.param("v3", 4, 1, 0, marks=pytest.mark.full),
        pytest.param("v3", 1, 3, 64, marks=pytest.mark.full),
    ],
)
def test_ranks_give_the_bits_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device,
    family: str, tensor: int, expert: int, padded_rows: int,
) -> None:  # fmt: skip
    """padded_rows: up to how many of them expert ranks take the path of CUDA graphs"""
    monkeypatch.setitem(spread_experts.MAX_PADDED_ROWS, device.type, padded_rows)
    folder = save_random_checkpoint(tmp_path, family, num_hidden_layers=2)
    [(expected, counts)] = run_ranks(1, 1, partial(run_rank, folder=folder, device=device, size=(1, 1)))
    found = run_ranks(tensor, expert, partial(run_rank, folder=folder, device=device, size=(tensor, expert)))
    assert expected.shape == (2 * len(STEPS), VOCAB_SIZE)
    for logits, rank_counts in found:
        assert torch.equal(rank_counts, counts)
        if len(logits):
            assert torch.equal(logits, expected), f"differ by {(logits - expected).abs().max():.3g}"
    assert sum(len(logits) > 0 for logits, _ in found) == tensor
