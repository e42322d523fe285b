"""What one engine holds and how long its steps may be. Filled from EngineConfig and the model by app.engine.loading."""

from __future__ import annotations

from dataclasses import dataclass

from app.engine.prompt_cost import PromptCost


@dataclass(frozen=True, slots=True)
class Limits:
    max_model_len: int
    max_num_seqs: int
    max_batched_tokens: int
    max_chunk_tokens: int
    max_waiting_seqs: int
    # Tokens, ascending: a prompt's chunks, but for the last, are multiples of the largest of these that they reach.
    chunk_steps: tuple[int, ...]
    max_step_s: float
    prompt_cost: PromptCost
    max_passed_over_s: float  # a request that waited so long is the next to be admitted
    prefix_caching: bool
    vocab_size: int
    eos_token_ids: frozenset[int]
