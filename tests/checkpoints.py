"""Small random checkpoints in Hugging Face layout, and the code that wrote them, transformers, as the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
)

VOCAB_SIZE = 96

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 1024,
    # Large enough that attention is peaked, routing is decided and logits differ.
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
}

# name -> (model_type, the fields in which it differs from _COMMON)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2_lite": (
        "deepseek_v2",
        {
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "topk_method": "greedy",
            "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "v2": (
        "deepseek_v2",
        {
            "q_lora_rank": 40,
            "n_shared_experts": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
            "attention_bias": True,
        },
    ),
    "v3": (
        "deepseek_v3",
        {
            "q_lora_rank": 40,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
            "num_nextn_predict_layers": 0,
        },
    ),
}
_CLASSES: dict[str, tuple[Any, Any]] = {
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
}
# save_pretrained drops these; a published config.json has them.
_DROPPED_FIELDS = ("topk_method", "scoring_func")


def save_random_checkpoint(folder: Path, family: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random fp32 model of `family` (see FAMILIES) to `folder`; `overrides` replace fields of its config."""
    model_type, fields = FAMILIES[family]
    fields = {**_COMMON, **fields, **overrides}
    config_class, model_class = _CLASSES[model_type]
    torch.manual_seed(seed)
    model = model_class(config_class(**fields))
    _randomize_constants(model)
    model.save_pretrained(folder)
    edit_json(folder / "config.json", **{name: fields[name] for name in _DROPPED_FIELDS if name in fields})
    return folder


def _randomize_constants(model: PreTrainedModel) -> None:
    """Move norms, biases and the router's correction off their initial ones and zeros, so that they matter."""
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith((".bias", "e_score_correction_bias")):
                parameter.normal_(0.0, 0.2)


def quantize_checkpoint(folder: Path, *, spread: float = 1.0) -> dict[str, torch.Tensor]:
    """Store a checkpoint's projections in e4m3 with 128 x 128 block scales. Returns its tensors, dequantised.

    spread: blocks are multiplied by random factors from 1 / spread to spread, so that their scales differ
    """
    tensors, stored = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        rows, columns = tensor.shape
        scales = torch.empty(-(-rows // 128), -(-columns // 128))
        stored[name] = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
                tensor[block] *= spread ** (2.0 * torch.rand((), generator=generator) - 1.0)
                scales[i, j] = tensor[block].abs().max() / 448
                stored[name][block] = (tensor[block] / scales[i, j]).to(torch.float8_e4m3fn)
                tensor[block] = stored[name][block].float() * scales[i, j]
        stored[name + "_scale_inv"] = scales
    save_file(stored, folder / "model.safetensors")
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    edit_json(folder / "config.json", quantization_config=quantization)
    return tensors


def edit_json(path: Path, **fields: Any) -> None:
    """Set top-level fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def load_oracle(folder: Path) -> PreTrainedModel:
    """The same checkpoint in transformers: fp32, eager attention."""
    config = json.loads((folder / "config.json").read_text())
    _, model_class = _CLASSES[config["model_type"]]
    model: PreTrainedModel = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def oracle_logits(oracle: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Logits after every token of one unpadded sequence: [len(token_ids), vocab] fp32."""
    logits: torch.Tensor = oracle(torch.tensor([token_ids])).logits[0]
    return logits


def random_prompt(length: int, *, seed: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, vocab_size, (length,), generator=generator).tolist()
