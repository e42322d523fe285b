"""One request inside the engine: its tokens, how many are computed, and the blocks that hold them.

    token_ids   | prompt ............ | output ...... |
                0      num_computed_tokens       num_tokens
                | in the cache        | to be computed |

A step computes some of the right part; when nothing is left there, it samples one more token.
"""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass, field

import torch

from app.protocol import FinishReason, GenerateRequest, SamplingParams


@dataclass(slots=True, eq=False)
class Sequence:
    request: GenerateRequest
    root_key: bytes
    arrival_s: float  # time.monotonic of this process, as are all times here
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    block_ids: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0
    num_preemptions: int = 0
    seed: int = 0
    output_counts: Counter[int] = field(default_factory=Counter)  # kept only if a penalty needs it
    seen: torch.Tensor | None = None  # likewise: which ids are among the first `num_seen` tokens
    num_seen: int = 0
    waiting_since_s: float = 0.0
    scheduled_s: float | None = None
    last_token_s: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        seed = self.request.sampling.seed
        self.seed = secrets.randbits(63) if seed is None else seed

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_new_tokens(self) -> int:
        """Tokens not computed yet: 1 while decoding, more while a prompt (or a preempted sequence) catches up."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def deadline_s(self) -> float | None:
        return None if self.request.timeout_s is None else self.arrival_s + self.request.timeout_s

    @property
    def order(self) -> tuple[int, float]:
        """Smaller runs first and is preempted last."""
        return self.request.priority, self.arrival_s

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        sampling = self.request.sampling
        if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0:
            self.output_counts[token_id] += 1
