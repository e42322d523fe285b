"""Engines over several ranks give the bits of one: heads, widths, vocabulary, rows and experts split between them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.config import EMBEDDED_MODEL, ModelSource
from app.engine.engine import Engine
from app.engine.loading import load_engine
from app.errors import ConfigError
from app.model.config import ModelConfig
from app.model.placement import ExpertPlacement
from app.protocol import GenerateRequest
from tests.checkpoints import FAMILIES, quantize_checkpoint, save_random_checkpoint
from tests.engine.sharded import (
    answer,
    check_same_logits,
    engine_config,
    greedy,
    prompt_of,
    sharded_engine,
)

SMALL = {"cache_blocks": 9, "max_batched_tokens": 80, "max_chunk_tokens": 48}  # chunks, and preemption


def requests_of(vocab_size: int, num_tokens: int) -> list[GenerateRequest]:
    """Lengths around row tiles and blocks; two of them share a prefix of two blocks."""
    prompts = {f"r{length}": prompt_of(length, length, vocab_size) for length in (1, 3, 64, 150)}
    prompts["shared"] = prompts["r150"][:130] + prompt_of(9, 5, vocab_size)
    return [greedy(name, prompt, num_tokens) for name, prompt in prompts.items()]


def reference(folder: Path) -> Engine:
    return load_engine(ModelSource(path=str(folder)), engine_config())


def random_checkpoint(folder: Path, family: str, **fields: object) -> Path:
    return save_random_checkpoint(folder, family, vocab_size=97, **fields)


def check_equal(folder: Path, tensor: int, expert: int, padded_rows: int = 0) -> None:
    requests = requests_of(ModelConfig.from_folder(folder).vocab_size, 64)
    expected = answer(reference(folder), requests)
    with sharded_engine(folder, engine_config(**SMALL), tensor, expert, padded_rows=padded_rows) as sharded:
        found = answer(sharded.engine, requests)
        stats = sharded.engine.stats()
    assert found.tokens == expected.tokens
    check_same_logits(found, expected)
    assert stats.num_preemptions > 0
    assert found.num_cached["shared"] == 128


def test_two_tensor_ranks_on_the_embedded_model() -> None:
    check_equal(EMBEDDED_MODEL, tensor=2, expert=1)


def test_two_expert_ranks_on_the_embedded_model() -> None:
    check_equal(EMBEDDED_MODEL, tensor=1, expert=2)


def test_two_by_two_in_the_form_of_cuda_graphs(tmp_path: Path) -> None:
    check_equal(random_checkpoint(tmp_path, "v3"), tensor=2, expert=2, padded_rows=1024)


@pytest.mark.full
@pytest.mark.parametrize(("tensor", "expert"), [(2, 1), (1, 2), (4, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_models(tmp_path: Path, family: str, tensor: int, expert: int) -> None:
    check_equal(random_checkpoint(tmp_path, family), tensor, expert)


@pytest.mark.full
@pytest.mark.parametrize(("tensor", "expert"), [(3, 1), (2, 2)])
def test_more_ranks_on_the_embedded_model(tensor: int, expert: int) -> None:
    check_equal(EMBEDDED_MODEL, tensor, expert)


@pytest.mark.full
def test_widths_that_nothing_divides(tmp_path: Path) -> None:
    """Ranks of unequal parts, and three shared experts that begin within a rank's part."""
    sizes = {"intermediate_size": 99, "moe_intermediate_size": 40, "n_shared_experts": 3}
    check_equal(random_checkpoint(tmp_path, "v3", **sizes), tensor=2, expert=2)


@pytest.mark.full
@pytest.mark.parametrize(("tensor", "expert"), [(2, 1), (1, 2)])
def test_tied_embeddings_and_biases(tmp_path: Path, tensor: int, expert: int) -> None:
    folder = random_checkpoint(tmp_path, "v2", tie_word_embeddings=True, attention_bias=True)
    check_equal(folder, tensor, expert)


@pytest.mark.full
@pytest.mark.parametrize(("tensor", "expert"), [(2, 1), (2, 2)])
def test_parts_of_an_fp8_checkpoint(tmp_path: Path, tensor: int, expert: int) -> None:
    """Widths that blocks of 128 do not divide: ranks begin and end within blocks."""
    sizes = {"hidden_size": 192, "intermediate_size": 200, "moe_intermediate_size": 160, "initializer_range": 0.05}
    folder = random_checkpoint(tmp_path, "v3", **sizes)
    quantize_checkpoint(folder)
    check_equal(folder, tensor, expert)


# ---- where tokens go ----


def biased_checkpoint(folder: Path, bias: list[float]) -> Path:
    """One expert a token, chosen by a bias that outweighs every score if it is large."""
    random_checkpoint(folder, "v3", num_experts_per_tok=1, n_group=1, topk_group=1)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name] = torch.tensor(bias, dtype=torch.float32)
    save_file(tensors, file)
    return folder


def check_counts(folder: Path, placement: Path | None = None) -> dict[str, list[int]]:
    """Same logits as one rank, same counts; gives the counts by layer."""
    requests = requests_of(97, 8)
    alone = reference(folder)
    expected = answer(alone, requests)
    with sharded_engine(folder, engine_config(), 1, 2, placement=placement) as sharded:
        found = answer(sharded.engine, requests)
        counts = sharded.engine.stats().expert_tokens
    assert found.tokens == expected.tokens
    check_same_logits(found, expected)
    assert counts == alone.stats().expert_tokens
    by_layer: dict[str, list[int]] = {}
    for key, count in counts.items():
        by_layer.setdefault(key.partition(".")[0], []).append(count)
    assert {sum(layer) for layer in by_layer.values()} == {sum(map(num_computed, requests)) - 128}
    return by_layer


def num_computed(request: GenerateRequest) -> int:
    """Tokens that pass the layers; the last one that is sampled does not."""
    return len(request.prompt_token_ids) + request.sampling.max_tokens - 1


def test_all_tokens_at_one_expert(tmp_path: Path) -> None:
    counts = check_counts(biased_checkpoint(tmp_path, [0, 0, 0, 0, 0, 9, 0, 0]))
    assert all(layer[:5] + layer[6:] == [0] * 7 for layer in counts.values())


def test_a_busy_expert_on_both_ranks(tmp_path: Path) -> None:
    folder = biased_checkpoint(tmp_path, [0, 0.2, 0, 0, 0, 0.4, 0, 0])
    placement = ExpertPlacement.balanced({1: [1, 5, 1, 1, 1, 9, 1, 1], 2: [0, 9, 0, 0, 0, 9, 0, 0]}, 8, 2, num_copies=2)
    assert placement.layer(1).ranks_of(5) == [0, 1]
    placement.write(tmp_path / "placement.json")
    counts = check_counts(folder, tmp_path / "placement.json")
    assert all(max(layer) > 2 * sum(layer) / 8 for layer in counts.values())


# ---- what cannot be ----


@pytest.mark.parametrize(
    ("tensor", "expert", "message"),
    [
        (3, 1, "parallel.tensor: 3 does not divide the model's 4 heads; these do: 1, 2, 4"),
        (1, 9, "parallel.expert: 9 ranks for a model of 8 routed experts"),
    ],
)
def test_a_split_that_does_not_divide_is_refused(tmp_path: Path, tensor: int, expert: int, message: str) -> None:
    folder = random_checkpoint(tmp_path, "v3")
    with pytest.raises(ConfigError) as error, sharded_engine(folder, engine_config(), tensor, expert):
        pass
    assert error.value.message == message


def test_a_placement_for_other_ranks_is_refused(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "model", "v3")
    (tmp_path / "placement.json").write_text(json.dumps({"layers": {"1": [list(range(8))]}}))
    with (
        pytest.raises(ConfigError, match="layer 1 does not place experts 0 to 7 on 2 ranks"),
        sharded_engine(folder, engine_config(), 1, 2, placement=tmp_path / "placement.json"),
    ):
        pass
