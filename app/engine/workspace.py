"""How much device memory steps need beside weights and cache: an upper estimate from shapes alone."""

from __future__ import annotations

from app.engine.graphs import batch_sizes, prompt_shapes
from app.engine.limits import Limits
from app.model.attention.mla import MAX_KEYS
from app.model.config import ModelConfig
from kernels import invariance
from kernels.mla_decode_plan import MAX_SEGMENTS

LIBRARY_BYTES = 2**29  # matrix library, graphs' own structures
FRAGMENTATION = 1.25


def workspace_bytes(model: ModelConfig, limits: Limits, bytes_per_value: int) -> int:
    """The largest step's activations, expanded keys and values, and what every graph keeps of its own."""
    hidden, heads = model.hidden_size, model.num_heads
    attention = 6 * hidden + 2 * (heads * model.qk_head_dim + model.cache_dim) + 2 * heads * model.v_head_dim
    mlp = 4 * model.intermediate_size
    if model.moe is not None:
        num_chosen = model.moe.top_k + model.moe.num_shared_experts
        mlp = max(mlp, num_chosen * (2 * model.moe.intermediate_size + hidden))
    row_bytes = (attention + mlp) * bytes_per_value
    if invariance.is_required():  # every row's segments are kept until they are merged
        row_bytes += 4 * MAX_SEGMENTS * heads * model.kv_lora_rank
        if bytes_per_value == 4:  # results and sums in fp64
            row_bytes *= 2
    key_bytes = (heads * (model.qk_nope_head_dim + model.v_head_dim) + model.cache_dim) * bytes_per_value
    shapes = prompt_shapes(limits.max_num_seqs, limits.max_batched_tokens)
    num_logit_rows = sum(batch_sizes(limits.max_num_seqs)) + sum(shape.num_seqs for shape in shapes)
    logit_bytes = 4 * model.vocab_size
    steps = limits.max_batched_tokens * row_bytes + max(MAX_KEYS, limits.max_model_len) * key_bytes
    return int(FRAGMENTATION * steps) + (num_logit_rows + 2 * limits.max_num_seqs) * logit_bytes + LIBRARY_BYTES
