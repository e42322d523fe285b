"""What prompt tokens cost by the length of what they attend to, so that a step's time can be foreseen."""

from __future__ import annotations

import math
from dataclasses import dataclass

from app.model.config import ModelConfig

MIN_TOKENS = 16  # of a chunk: what a step costs whatever it computes is spread over as many


@dataclass(frozen=True, slots=True)
class PromptCost:
    """Costs in units of a token that attends to nothing; one multiplication counts as much wherever it is done.

    `count` tokens behind `start` earlier ones cost

        count + count * (start + count / 2) / keys_per_token + expanded_key * (start + count)
    """

    keys_per_token: float  # as many keys cost as much to attend to as the rest of the model for a token
    expanded_key: float  # to expand one key, once for a chunk; 0 if attention is absorbed

    @classmethod
    def of_model(cls, config: ModelConfig, *, absorbed: bool) -> PromptCost:
        """From the multiplications of the forward pass (see app.model.attention.mla)."""
        heads, rank = config.num_heads, config.kv_lora_rank
        nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        query_in = config.q_lora_rank or config.hidden_size
        projections = config.hidden_size * (config.q_lora_rank or 0) + query_in * heads * (nope + rope)
        projections += config.hidden_size * (rank + rope + heads * value)
        expansion = rank * heads * (nope + value)
        mlps = sum(_mlp(config, layer) for layer in range(config.num_layers)) / config.num_layers
        token = projections + mlps + (expansion if absorbed else 0)
        key = heads * (2 * rank + rope if absorbed else nope + rope + value)
        return cls(keys_per_token=token / key, expanded_key=0.0 if absorbed else expansion / token)

    @property
    def min_tokens(self) -> int:
        """Of a chunk that does not end its prompt: attending costs as much then as expanding what it attends to."""
        return max(MIN_TOKENS, math.ceil(self.expanded_key * self.keys_per_token))

    def of(self, start: int, count: int) -> float:
        if count == 0:
            return 0.0
        return count + count * (start + count / 2) / self.keys_per_token + self.expanded_key * (start + count)

    def fitting(self, start: int, cost: float) -> float:
        """The largest count, unrounded, that costs no more; below 0 if not even expanding the keys does."""
        if math.isinf(cost):
            return cost
        slope = 1 + start / self.keys_per_token + self.expanded_key
        rest = cost - self.expanded_key * start
        if rest <= 0:
            return -1.0
        return 2 * rest / (slope + math.sqrt(slope * slope + 2 * rest / self.keys_per_token))


def _mlp(config: ModelConfig, layer: int) -> int:
    moe = config.moe
    if moe is None or not config.is_moe_layer(layer):
        return 3 * config.hidden_size * config.intermediate_size
    experts = moe.top_k + moe.num_shared_experts
    return config.hidden_size * (3 * moe.intermediate_size * experts + moe.num_experts)
