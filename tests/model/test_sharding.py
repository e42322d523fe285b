"""What one rank holds of a model, and what it costs to load it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from app.model.checkpoint import Checkpoint, Span
from app.model.config import ModelConfig
from app.model.placement import ExpertPlacement
from app.model.sharding import EXACT_TENSOR, Shard, piece_ends
from app.model.weights import load_weights, random_weights
from tests.checkpoints import save_random_checkpoint

MAX_PEAK = 1.3  # of the bytes of a rank's part in the files
ROOT = Path(__file__).parent.parent.parent


@given(st.integers(1, 5000), st.integers(1, 9))
def test_widths_and_vocabulary_are_cut_without_gaps(total: int, num_ranks: int) -> None:
    shards = [Shard(rank, num_ranks) for rank in range(num_ranks)]
    for spans in ([shard.width(total) for shard in shards], [shard.vocabulary(total)[0] for shard in shards]):
        assert [index for span in spans for index in range(span.start, span.start + span.count)] == list(range(total))
    if total % 8 == 0 and total // 8 >= num_ranks:
        assert all(shard.width(total).count % 8 == 0 for shard in shards)
    assert all(shard.vocabulary(total)[0].count <= shard.vocabulary(total)[1] for shard in shards)


def test_fp8_blocks_stay_whole_where_there_are_enough() -> None:
    shards = [Shard(rank, 2, width_unit=128) for rank in range(2)]
    assert [shard.width(1408).count for shard in shards] == [640, 768]
    assert [shard.width(128).count for shard in shards] == [64, 64]


def test_heads_stay_whole() -> None:
    spans = [Shard(rank, 4).heads(8, 10) for rank in range(4)]
    assert [(span.start, span.count, span.total) for span in spans] == [(20 * rank, 20, 80) for rank in range(4)]


@given(st.integers(1, 3000), st.integers(1, 3), st.sampled_from([4, 6, 12]), st.booleans())
def test_no_rank_has_a_part_of_a_piece(width: int, num_experts: int, num_heads: int, is_fp8: bool) -> None:
    """The pieces of a rank are pieces of the whole, whether its experts' widths are cut one by one or side by side."""
    config = replace(ModelConfig.from_folder(ROOT / "app/assets/tiny"), num_heads=num_heads, is_fp8=is_fp8)
    one = {0, *piece_ends(config, Span.whole(width))}
    all_ = {0, *piece_ends(config, Span.whole(num_experts * width), count=num_experts)}
    assert all_ == {index * width + end for index in range(num_experts) for end in one}
    for num_ranks in (1, *EXACT_TENSOR):
        if num_heads % num_ranks:
            continue
        for rank in range(num_ranks):
            shard = Shard.of(config, rank, num_ranks, 1)
            for count, ends in ((1, one), (num_experts, all_)):
                span = shard.width(width, count)
                own = {span.start, *(span.start + end for end in piece_ends(config, span, count=count))}
                assert own == {end for end in ends if span.start <= end <= span.start + span.count}


def bytes_read(folder: Path, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> int:
    opened: list[Checkpoint] = []
    create = Checkpoint.__init__

    def opening(self: Checkpoint, *args: object) -> None:
        create(self, *args)  # type: ignore[arg-type]
        opened.append(self)

    monkeypatch.setattr(Checkpoint, "__init__", opening)
    load_weights(folder, ModelConfig.from_folder(folder), dtype=torch.float32, device="cpu", shard=shard)
    monkeypatch.undo()
    return opened[0].bytes_read


def test_ranks_read_their_parts_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_random_checkpoint(tmp_path, "v3")
    tensors = load_file(folder / "model.safetensors")
    total = sum(tensor.nbytes for tensor in tensors.values())
    experts = sum(tensor.nbytes for name, tensor in tensors.items() if ".experts." in name)
    split = [name for name in tensors if name.endswith(("q_b_proj.weight", "kv_b_proj.weight", "o_proj.weight"))]
    split += [name for name in tensors if ".mlp." in name and name.endswith("_proj.weight")]
    split += ["lm_head.weight", "model.embed_tokens.weight"]
    halves = sum(tensors[name].nbytes for name in split) // 2
    assert bytes_read(folder, Shard(), monkeypatch) == total
    assert [bytes_read(folder, Shard(rank, 2), monkeypatch) for rank in (0, 1)] == [total - halves] * 2
    placement = ExpertPlacement.even(8, 2)
    read = [bytes_read(folder, Shard(0, 1, rank, placement), monkeypatch) for rank in (0, 1)]
    assert read == [total - experts // 2, total - experts // 2 - tensors["lm_head.weight"].nbytes]


def test_random_parts_are_parts_of_one_model() -> None:
    config = ModelConfig.from_folder(ROOT / "app/assets/tiny")
    whole, part = (
        random_weights(config, seed=3, dtype=torch.bfloat16, device="cpu", shard=shard) for shard in (None, Shard(1, 2))
    )
    rows = part.embedding.shape[0]
    assert torch.equal(part.embedding, whole.embedding[rows : 2 * rows])
    kv_b = whole.layers[0].attention.kv_b
    assert torch.equal(part.layers[0].attention.kv_b, kv_b[kv_b.shape[0] // 2 :])


@pytest.mark.full
def test_loading_takes_little_more_memory_than_the_part_itself(tmp_path: Path) -> None:
    """160 MB in bf16; on a CPU in fp32 the weights are packed, which loses nothing of bf16 numbers."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256, "n_routed_experts": 16}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    save_random_checkpoint(tmp_path, "v3", vocab_size=4096, num_hidden_layers=12, **sizes, **heads)
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor if "bias" in name else tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    for dtype in ("bfloat16", "float32"):
        for rank, tensor, expert in ((1, 2, 1), (0, 1, 2), (3, 2, 2)):
            command = [sys.executable, "-m", "tests.model.loading_memory", str(tmp_path)]
            command += [str(rank), str(tensor), str(expert), dtype]
            done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120)
            found = json.loads(done.stdout.splitlines()[-1])
            assert found["read"] <= 0.6 * total / (2 if rank == 3 else 1)
            assert found["peak"] <= MAX_PEAK * found["read"], (dtype, rank, tensor, expert)
