"""An engine around random weights of a named shape, and requests of random tokens for it."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

import torch

from app.config import EngineConfig
from app.engine.engine import Engine
from app.engine.loading import build_engine, is_batch_invariant
from app.model.config import ModelConfig
from app.model.transformer import Transformer
from app.model.weights import ModelWeights, random_weights
from app.protocol import GenerateRequest, SamplingParams
from kernels import invariance

# 132 tiles of 128 queries: with 16 heads, four whole rounds of attention on an H200's 132 multiprocessors.
STEP_TOKENS = 16_896
ENGINE_CONFIG = EngineConfig(
    max_num_seqs=512, max_batched_tokens=STEP_TOKENS, max_chunk_tokens=STEP_TOKENS, max_waiting_seqs=1024
)
# Architecture figures of public checkpoints; weights are drawn from N(0, 0.02).
SHAPES: dict[str, dict[str, object]] = {
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "n_shared_experts": 2,
        "n_routed_experts": 64, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "routed_scaling_factor": 1.0, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "eos_token_id": 100001,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
            "mscale": 0.707, "mscale_all_dim": 0.707,
        },
    },
}  # fmt: skip


def shape_config(name: str) -> ModelConfig:
    """The architecture of SHAPES[name], or of the checkpoint in the folder `name`. Raises KeyError on neither."""
    if name not in SHAPES and Path(name).is_dir():
        return ModelConfig.from_folder(name)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[name]))
        return ModelConfig.from_folder(folder)


def random_engine(model_config: ModelConfig, config: EngineConfig) -> Engine:
    """An engine around random weights: on CUDA in bfloat16 where there is a device, else on CPU in float32."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return engine_around(random_weights(model_config, seed=0, dtype=dtype, device=device), model_config, config)


def engine_around(weights: ModelWeights, model_config: ModelConfig, config: EngineConfig) -> Engine:
    device, dtype = weights.embedding.device, weights.embedding.dtype
    absorbed = is_batch_invariant(config, device, dtype)
    invariance.require(absorbed and device.type == "cuda")
    model = Transformer(model_config, weights, device=device, dtype=dtype, absorbed_prefill=absorbed)
    return build_engine(model, config, version="random")


def random_request(
    engine: Engine, rng: random.Random, name: str, num_prompt_tokens: int, num_output_tokens: int
) -> GenerateRequest:
    """Greedy, and of exactly so many tokens."""
    prompt = tuple(rng.randrange(1000, engine.limits.vocab_size) for _ in range(num_prompt_tokens))
    return GenerateRequest(name, prompt, SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True))
