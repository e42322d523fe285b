"""How long a replica takes to start and to step, and what its cache holds: the simulator's picture of an engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class ReplicaCost:
    """One replica. A step takes

        step_base_s + prefill / prefill_tokens_per_s + decodes * decode_seq_s + context * context_token_s

    where `context` is the tokens that the decoding sequences attend to. Raises ValueError that names the field.
    """

    start_delay_s: float = 120.0  # decision to the first request taken
    prefill_tokens_per_s: float = 8000.0
    step_base_s: float = 0.02
    decode_seq_s: float = 0.0002  # per decoding sequence
    context_token_s: float = 1e-8  # per token attended to
    kv_capacity_tokens: int = 262_144
    max_running_seqs: int = 64
    max_batched_tokens: int = 2048
    max_chunk_tokens: int = 512  # prompt tokens of one sequence in one step

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{item.name}: must be a finite number, at least 0, got {value}")
        for name in ("prefill_tokens_per_s", "kv_capacity_tokens", "max_running_seqs", "max_chunk_tokens"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name}: must be greater than 0")
        if self.step_base_s + self.decode_seq_s == 0:
            raise ValueError("step_base_s: a decoding step must take time")
        if self.max_batched_tokens < self.max_running_seqs:
            raise ValueError("max_batched_tokens: must be at least max_running_seqs")

    def step_s(self, num_prefill_tokens: int, num_decodes: int, num_context_tokens: int) -> float:
        """Seconds of one step."""
        return (
            self.step_base_s
            + num_prefill_tokens / self.prefill_tokens_per_s
            + num_decodes * self.decode_seq_s
            + num_context_tokens * self.context_token_s
        )

    def decode_s(self, num_steps: int, num_decodes: int, num_context_tokens: int) -> float:
        """Seconds of `num_steps` decoding steps; every sequence's context grows by one token in each."""
        grown = num_decodes * num_steps * (num_steps - 1) / 2
        return num_steps * self.step_s(0, num_decodes, num_context_tokens) + grown * self.context_token_s

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds to compute a prompt with nothing beside it."""
        num_steps = -(-num_tokens // min(self.max_chunk_tokens, self.max_batched_tokens))
        return num_steps * self.step_base_s + num_tokens / self.prefill_tokens_per_s

    def saturated_prefill_tokens_per_s(self) -> float:
        """Prompt tokens a second with full steps and no decoding."""
        return self.max_batched_tokens / self.step_s(self.max_batched_tokens, 0, 0)

    def requests_per_s(self, num_prompt_tokens: float, num_output_tokens: float) -> float:
        """Requests of one shape that a replica finishes a second when it is never idle.

        Prefill takes its time and decoding gets the rest, with as many sequences in a step as batch and cache hold.
        """
        kept = num_prompt_tokens + num_output_tokens / 2
        batch = max(1.0, min(self.max_running_seqs, self.kv_capacity_tokens / kept))
        prefill_s = num_prompt_tokens / self.saturated_prefill_tokens_per_s()
        decode_s = num_output_tokens * self.step_s(0, 1, 0) if batch <= 1 else 0.0
        if batch > 1:
            step_s = self.step_base_s + batch * (self.decode_seq_s + kept * self.context_token_s)
            decode_s = num_output_tokens * step_s / batch
        return 1.0 / (prefill_s + decode_s)
