"""FP8 checkpoints and an FP8 cache on CUDA: the engine beside the definition, and beside the exact checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from app.config import EngineConfig, ModelSource
from app.engine.loading import load_engine
from app.engine.ranks import RankPlace, run_rank
from app.model.config import ModelConfig
from app.model.moe import Fp8Layer, MoeWeights
from app.model.sharding import Shard
from app.model.weights import load_weights
from tests.checkpoints import VOCAB_SIZE
from tests.engine.sharded import answer, greedy
from tests.model.conftest import load_transformer
from tests.model.fp8_definition import (
    MAX_ERROR,
    MAX_MEAN_KL,
    MAX_MEDIAN_ERROR,
    NUM_OUTPUTS,
    forced_logits,
    load_definition,
    mean_kl,
    prompts,
    row_errors,
    save_fp8_checkpoint,
)
from tests.two_ranks import NEEDS_TWO_GPUS, run_two_ranks

pytestmark = pytest.mark.gpu

RANKS_TIMEOUT_S = 120.0
Answer = tuple[dict[str, list[int]], torch.Tensor]  # tokens by request; the logits before each of them


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_fp8_checkpoint(tmp_path_factory.mktemp("models"))


def engine_config(dtype: str, cache_dtype: str) -> EngineConfig:
    """Prompts come in chunks of 48 tokens, beside decodes; 32 sequences make a prompt's graph as two ranks cut it have
    as many sequences as rows."""
    return EngineConfig(
        device="cuda", dtype=dtype, cache_dtype=cache_dtype, cache_blocks=64, max_num_seqs=32, max_chunk_tokens=48
    )


def greedy_answer(folder: Path, dtype: str, cache_dtype: str, place: RankPlace | None = None) -> Answer:
    engine = load_engine(ModelSource(path=str(folder)), engine_config(dtype, cache_dtype), place)
    engine.warm_up(is_complete=True)
    requests = [greedy(name, tuple(prompt), NUM_OUTPUTS) for name, prompt in prompts().items()]
    found = answer(engine, requests)
    engine.stop()
    # A step launched ahead may compute a row past a sequence's end.
    rows = [row.float().cpu() for logits in found.logits.values() for row in logits[:NUM_OUTPUTS]]
    return found.tokens, torch.stack(rows)


def check_definition(answer: Answer, folder: Path, cache_dtype: str, *, shared_is_exact: bool = False) -> None:
    tokens, logits = answer
    assert logits.shape == (len(tokens) * NUM_OUTPUTS, VOCAB_SIZE)
    model, _ = load_definition(folder, shared_is_exact=shared_is_exact)
    errors = row_errors(logits, forced_logits(model, tokens, is_fp8_cache=cache_dtype == "fp8"))
    assert errors.median() <= MAX_MEDIAN_ERROR
    assert errors.max() <= MAX_ERROR


def test_experts_keep_the_checkpoints_bytes(folders: tuple[Path, Path]) -> None:
    """Whole, and in each of two tensor ranks' halves."""
    config = ModelConfig.from_folder(folders[0])
    for rank in range(2):
        for shard, width in ((None, 256), (Shard.of(config, rank, 2, 1), 128)):
            weights = load_weights(folders[0], config, dtype=torch.bfloat16, device="cuda", shard=shard)
            mlp = weights.layers[-1].mlp
            assert isinstance(mlp, MoeWeights) and isinstance(mlp.experts, Fp8Layer)
            assert mlp.experts._weights.down.shape[2] == width


@pytest.mark.parametrize("cache_dtype", ["fp8", "auto"])
def test_in_fp32_the_engine_gives_the_definition(folders: tuple[Path, Path], cache_dtype: str) -> None:
    check_definition(greedy_answer(folders[0], "float32", cache_dtype), folders[0], cache_dtype)


@pytest.mark.parametrize("cache_dtype", ["fp8", "auto"])
def test_in_bf16_the_engine_stays_near_the_exact_checkpoint(folders: tuple[Path, Path], cache_dtype: str) -> None:
    tokens, logits = greedy_answer(folders[0], "bfloat16", cache_dtype)
    exact = forced_logits(load_transformer(folders[1]), tokens, is_fp8_cache=False)
    assert 0 < mean_kl(logits, exact) <= MAX_MEAN_KL


def test_batch_invariant_answers_do_not_depend_on_what_runs_beside_them(folders: tuple[Path, Path]) -> None:
    """To the bit of every logit."""
    config = engine_config("bfloat16", "fp8").model_copy(update={"batch_invariant": True})
    engine = load_engine(ModelSource(path=str(folders[0])), config)
    requests = [greedy(name, tuple(prompt), NUM_OUTPUTS) for name, prompt in prompts().items()]
    together = answer(engine, requests)
    for request in requests:
        engine.reset()
        alone, name = answer(engine, [request]), request.request_id
        assert alone.tokens[name] == together.tokens[name]
        pairs = list(zip(alone.logits[name], together.logits[name], strict=True))[:NUM_OUTPUTS]
        assert all(torch.equal(a, b) for a, b in pairs)
    engine.stop()


@NEEDS_TWO_GPUS
@pytest.mark.parametrize(("tensor", "expert"), [(2, 1), (1, 2)])
def test_two_ranks_give_the_definition(folders: tuple[Path, Path], tmp_path: Path, tensor: int, expert: int) -> None:
    file = tmp_path / "answer.pt"
    run_two_ranks(_run, folders[0], file, tensor=tensor, expert=expert, timeout_s=RANKS_TIMEOUT_S)
    check_definition(torch.load(file), folders[0], "fp8", shared_is_exact=expert > 1)


def _run(place: RankPlace, folder: Path, file: Path) -> None:
    torch.cuda.set_device(place.rank)
    if place.rank:
        run_rank(ModelSource(path=str(folder)), engine_config("float32", "fp8"), place)
    else:
        torch.save(greedy_answer(folder, "float32", "fp8", place), file)
    os._exit(0)  # communicators that graphs use cannot be closed
