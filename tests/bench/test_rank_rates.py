"""Which splits are compared, and what the comparison says of two engines that agree and of two that do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.bench import rank_rates
from app.bench.engine_rates import GRID, LEAST_PREFILL_STEP
from app.bench.random_engine import shape_config
from app.bench.rank_rates import CONFIG, INVARIANT_CONFIG, RATES_CONFIG, Kind, Split, splits_of
from app.config import EngineConfig
from app.engine.loading import build_engine
from app.model.config import ModelConfig
from app.model.transformer import Transformer
from app.model.weights import random_weights
from tests.checkpoints import save_random_checkpoint


def test_kinds_are_read_and_named() -> None:
    kinds = [Kind.parse(text) for text in ("float32:3", "invariant-float32", "bfloat16")]
    assert kinds == [Kind("float32", 3), Kind("float32", None, is_invariant=True), Kind("bfloat16", None)]
    assert [str(kind) for kind in kinds] == ["float32 3 layers", "invariant-float32", "bfloat16"]
    assert [kind.engine_config for kind in kinds] == [CONFIG, INVARIANT_CONFIG, RATES_CONFIG]
    assert INVARIANT_CONFIG.batch_invariant and not CONFIG.batch_invariant


def test_two_gpus_are_split_both_ways_and_rates_belong_to_one_kind(tmp_path: Path) -> None:
    kinds = [Kind.parse("invariant-float32"), Kind.parse("bfloat16")]
    splits = splits_of(2, tmp_path, kinds, GRID)
    assert [(split.tensor, split.expert) for split in splits] == [(1, 1), (2, 1), (1, 2)] * 2
    assert [split.grid for split in splits] == [()] * 3 + [GRID] * 3
    assert len({split.reference for split in splits}) == 2
    assert splits[1].name == "T=2 E=1 invariant-float32"


def test_the_invariant_engine_holds_all_prompts_at_once() -> None:
    blocks = sum(-(-(length + rank_rates.NUM_OUTPUTS) // 64) for length in rank_rates.PROMPT_TOKENS)
    assert INVARIANT_CONFIG.cache_blocks is not None and blocks <= INVARIANT_CONFIG.cache_blocks
    assert INVARIANT_CONFIG.max_model_len is not None
    assert max(rank_rates.PROMPT_TOKENS) + rank_rates.NUM_OUTPUTS <= INVARIANT_CONFIG.max_model_len
    assert INVARIANT_CONFIG.max_model_len <= shape_config("deepseek-v2-lite").max_position_embeddings


def test_the_rated_engine_holds_the_whole_grid() -> None:
    """As `measure` asks for it: the first prompts decode while the last ones are computed."""
    for batch, context in GRID:
        tokens = context + batch * -(-context // LEAST_PREFILL_STEP) + 32 + 8
        assert RATES_CONFIG.cache_blocks is not None and batch * -(-tokens // 64) <= RATES_CONFIG.cache_blocks
        assert batch <= RATES_CONFIG.max_num_seqs


def test_parity_tells_agreement_from_differences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_rates, "PROMPT_TOKENS", (3, 20))
    monkeypatch.setattr(rank_rates, "NUM_OUTPUTS", 4)
    config = ModelConfig.from_folder(save_random_checkpoint(tmp_path, "v2_lite"))
    engine_config = EngineConfig(device="cpu", cache_blocks=8)
    first, second = (Split(size, 1, Kind("float32", None), (), tmp_path / "reference.pt") for size in (1, 2))

    def parity(split: Split, seed: int) -> dict[str, object]:
        weights = random_weights(config, seed=seed, dtype=torch.float32, device="cpu")
        model = Transformer(config, weights, device="cpu", dtype=torch.float32, absorbed_prefill=True)
        engine = build_engine(model, engine_config, version="random")
        return rank_rates._parity(engine, model.expert_counts, split)

    assert parity(first, 0) == {"tokens": 8}
    same = parity(second, 0)
    # Each of 2 layers chooses 3 experts for all prompt tokens and all outputs but the last one of each.
    num_choices = 2 * 3 * (23 + 2 * 3)
    assert (same["max_logit_diff"], same["greedy_equal"], same["greedy_of"]) == (0.0, 8, 8)
    assert (same["choices_moved_at_least"], same["choices"]) == (0, num_choices)
    other = parity(second, 1)
    assert other["max_logit_diff"] > 0.0 and 0 < other["choices_moved_at_least"] < num_choices
