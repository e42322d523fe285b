"""The few types that cross process boundaries: router -> replica -> engine and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from app.errors import InvalidRequestError

FinishReason = Literal["stop", "length", "abort", "deadline", "error"]
MAX_TOP_LOGPROBS = 20
MAX_STOP_CHARS = 1024  # of one stop string: text that could begin one is held back


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Defaults are OpenAI's; `None` means the control is off."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives reported beside the chosen token; 0 reports the chosen one only

    def __post_init__(self) -> None:
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        _check_range("max_tokens", self.max_tokens, 1, None)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        if self.top_k is not None:
            _check_range("top_k", self.top_k, 1, None)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        for bias in self.logit_bias.values():
            _check_range("logit_bias", bias, -100.0, 100.0)
        if self.seed is not None:
            _check_range("seed", self.seed, -(2**63), 2**63 - 1)
        if any(not text for text in self.stop):
            raise InvalidRequestError("stop: must not contain an empty string", param="stop")
        if any(len(text) > MAX_STOP_CHARS for text in self.stop):
            raise InvalidRequestError(f"stop: strings must be at most {MAX_STOP_CHARS} characters long", param="stop")
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _check_range(name: str, value: float, low: float | None, high: float | None) -> None:
    if isinstance(value, bool) or not math.isfinite(value):
        raise InvalidRequestError(f"{name}: must be a finite number, got {value}", param=name)
    if low is not None and value < low:
        raise InvalidRequestError(f"{name}: must be at least {low}, got {value}", param=name)
    if high is not None and value > high:
        raise InvalidRequestError(f"{name}: must be at most {high}, got {value}", param=name)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to generate. The router fills every field; `n` choices are `n` requests."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0  # lower runs first, as in vLLM
    timeout_s: float | None = None  # counted from arrival at the replica: clocks differ between hosts
    cache_salt: str = ""  # sequences share cached prefixes only under the same salt


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities of the model's distribution at one position, before any sampling control."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """What one or more engine steps added to a sequence. The last chunk has a finish_reason."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token id, if asked for
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    num_output_tokens: int = 0  # so far, this chunk included
    text: str = ""  # filled by the replica
    error: str | None = None  # with finish_reason "error"


def join_chunks(chunks: Sequence[TokenChunk]) -> TokenChunk:
    """Consecutive chunks of one sequence as one."""
    if len(chunks) == 1:
        return chunks[0]
    logprobs = [entry for chunk in chunks for entry in chunk.logprobs or ()]
    return replace(
        chunks[-1],
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(logprobs) if logprobs else chunks[-1].logprobs,
        text="".join(chunk.text for chunk in chunks),
    )


@dataclass(frozen=True, slots=True)
class Histogram:
    """Exact counts per bucket; `counts` has one entry more than `bounds` (the overflow)."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of one engine. Counters are cumulative since its start; gauges are of this moment.

    Counter and gauge names are the field's (vLLM's) names, so `serving/metrics.py` can render them one to one.
    """

    # gauges
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_waiting_prefill_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0  # never used or evictable
    num_cached_blocks: int = 0  # evictable blocks that hold a reusable prefix
    oldest_waiting_s: float = 0.0
    weight_bytes_read: int = 0  # of the checkpoint's files by this process, one rank of several perhaps
    # counters
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefill_tokens_computed: int = 0
    prefill_step_tokens: int = 0  # prompt tokens of the steps that had enough of them to show the engine's speed
    prefill_step_seconds: float = 0.0  # duration of these steps
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    num_preemptions: int = 0
    num_steps: int = 0
    request_success: Mapping[str, int] = field(default_factory=dict)  # by finish_reason
    expert_tokens: Mapping[str, int] = field(default_factory=dict)  # tokens routed, by "layer.expert"
    # seconds
    time_to_first_token_seconds: Histogram | None = None
    inter_token_latency_seconds: Histogram | None = None
    e2e_request_latency_seconds: Histogram | None = None
    request_queue_time_seconds: Histogram | None = None
    step_time_seconds: Histogram | None = None

    @property
    def kv_cache_usage_perc(self) -> float:
        """Share of blocks held by live sequences, 0 to 1 (the field's name, though it is a fraction)."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0
