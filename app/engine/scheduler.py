"""Which sequences run in the next step, and what becomes of their tokens. Knows blocks, never tensors.

add -> waiting --admit--> running --commit--> finished
          ^                  |
          +----- preempt ----+     blocks freed, recomputed on return
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Sequence as Seq

from app.cache.blocks import BlockPool
from app.cache.layout import CacheLayout
from app.cache.prefix import extend_keys, root_key
from app.engine.batch import Batch
from app.engine.limits import Limits
from app.engine.pacing import PrefillPacer, StepBudget
from app.engine.sampler import needs_host
from app.engine.sequence import Sequence
from app.engine.stats import StatsRecorder
from app.errors import ContextLengthError, InvalidRequestError, OverloadedError
from app.protocol import EngineStats, FinishReason, GenerateRequest, TokenChunk, TokenLogprob

RESERVE_SHARE = 0.05  # of all blocks, at most one per running sequence
# Longer steps compute prompts faster. Where many requests wait, that is worth more than short steps are to the others.
CROWDED_QUEUE, CROWDED_STEP_FACTOR = 4, 2
MAX_CANDIDATES = 64  # waiting sequences that a step looks at
SHARED_WINDOW_S = 5.0  # steps stay short for so long after others last waited for them
OLDEST_PROMPT_SHARE = 0.25  # of a step's prompt work: however many shorter prompts come, the oldest gets so much


class Scheduler:
    def __init__(self, limits: Limits, layout: CacheLayout, num_blocks: int, version: str) -> None:
        self.limits = limits
        self.pool = BlockPool(num_blocks)
        self.stats = StatsRecorder()
        self._pacer = PrefillPacer(limits.max_batched_tokens, limits.max_step_s)
        self._shared_s = -math.inf  # when a step last had more than one prompt to care for
        self._layout = layout
        self._version = version
        self._waiting: list[Sequence] = []  # in order: preempted first, then priority, then arrival
        self._running: list[Sequence] = []  # in order of admission
        self._sequences: dict[str, Sequence] = {}  # waiting and running, by request id

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._sequences)

    def snapshot(self) -> EngineStats:
        return self.stats.snapshot(self._waiting, self._running, self.pool, time.monotonic())

    def validate(self, request: GenerateRequest) -> None:
        """Raise the RequestError of a request that can never run here, or OverloadedError if it may run later."""
        prompt, limits = request.prompt_token_ids, self.limits
        if not prompt:
            raise InvalidRequestError("prompt: must not be empty", param="prompt")
        if not 0 <= min(prompt) <= max(prompt) < limits.vocab_size:
            raise InvalidRequestError(f"prompt: token ids must lie in [0, {limits.vocab_size})", param="prompt")
        for field, ids in (
            ("logit_bias", request.sampling.logit_bias),
            ("stop_token_ids", request.sampling.stop_token_ids),
        ):
            if any(not 0 <= token_id < limits.vocab_size for token_id in ids):
                raise InvalidRequestError(f"{field}: token ids must lie in [0, {limits.vocab_size})", param=field)
        total = len(prompt) + request.sampling.max_tokens
        if total > limits.max_model_len:
            raise ContextLengthError(
                f"prompt of {len(prompt)} tokens and max_tokens {request.sampling.max_tokens} "
                f"exceed the context of {limits.max_model_len} tokens",
                param="prompt" if len(prompt) >= limits.max_model_len else "max_tokens",
            )
        if self._layout.num_blocks_of(total) > self.pool.num_blocks:
            capacity = self.pool.num_blocks * self._layout.block_size
            raise ContextLengthError(f"{total} tokens can never fit the cache of {capacity} tokens", param="max_tokens")
        if request.request_id in self._sequences:
            raise InvalidRequestError(f"request_id: {request.request_id} is already running", param="request_id")
        if len(self._waiting) >= limits.max_waiting_seqs:
            raise OverloadedError(f"{len(self._waiting)} requests are waiting already", retry_after_s=1.0)

    def add(self, request: GenerateRequest) -> Sequence:
        self.validate(request)
        seq = Sequence(request, root_key(self._version, request.cache_salt), arrival_s=time.monotonic())
        self._sequences[seq.request_id] = seq
        self._wait(seq)
        return seq

    def _wait(self, seq: Sequence) -> None:
        seq.waiting_since_s = time.monotonic()
        bisect.insort(self._waiting, seq, key=lambda other: (other.num_preemptions == 0, *other.order))

    def schedule(self) -> Batch | None:
        """Choose the next step's work and reserve its blocks; None if nothing can run.

        Decodes come first, then a quarter of what is left for the oldest prompt, then the others, those that lack the
        least first: running ones that this step completes, waiting ones, and the rest. A long prompt can so neither
        hold up short ones nor be held up, however many come; and few contexts are attended to in one step.
        """
        num_free = self.limits.max_batched_tokens
        scheduled: dict[str, tuple[Sequence, int]] = {}
        # Oldest first: when blocks run out, the youngest is preempted and the oldest always advances.
        for seq in sorted((seq for seq in self._running if seq.num_new_tokens == 1), key=lambda seq: seq.order):
            # It may have been preempted for an older one in this very loop.
            if num_free and seq in self._running and self._reserve(seq, scheduled):
                scheduled[seq.request_id] = seq, 1
                num_free -= 1
        prompts = sorted(
            (seq for seq in self._running if seq.num_new_tokens > 1), key=lambda seq: (seq.num_new_tokens, seq.order)
        )
        is_shared = bool(scheduled) or len(prompts) + len(self._waiting) > 1
        budget = StepBudget(self.limits.prompt_cost, num_free, self._allowance(is_shared=is_shared))
        if prompts:
            oldest = min(prompts, key=lambda seq: seq.arrival_s)
            self._take(oldest, budget, scheduled, share=OLDEST_PROMPT_SHARE)
        completed = [seq for seq in prompts if self._is_completed(seq, budget, scheduled)]
        for seq in completed:
            self._take(seq, budget, scheduled)
        left_over = min((seq.num_new_tokens for seq in prompts if seq not in completed), default=None)
        self._admit(scheduled, budget, left_over)
        for seq in prompts:
            self._take(seq, budget, scheduled)
        self._round_chunks(scheduled)
        return Batch.of(list(scheduled.values())) if scheduled else None

    def _allowance(self, *, is_shared: bool) -> float:
        """What this step's prompts may cost; infinite unless others care how long it takes."""
        now = time.monotonic()
        if is_shared:
            self._shared_s = now
        # Who comes in the middle of a long step waits for all of it, and where some came, others will.
        if now - self._shared_s >= SHARED_WINDOW_S:
            return math.inf
        factor = CROWDED_STEP_FACTOR if len(self._waiting) >= CROWDED_QUEUE else 1
        return factor * self._pacer.allowance

    def _is_completed(self, seq: Sequence, budget: StepBudget, scheduled: dict[str, tuple[Sequence, int]]) -> bool:
        before = scheduled.get(seq.request_id, (seq, 0))[1]
        count = seq.num_new_tokens
        return count <= self.limits.max_chunk_tokens and budget.fits(seq.num_computed_tokens + before, count - before)

    def _round_chunks(self, scheduled: dict[str, tuple[Sequence, int]]) -> None:
        """Cut chunks to whole rounds of attention: all of a device takes as long for a little more as for a round."""
        for request_id, (seq, count) in scheduled.items():
            step = max((step for step in self.limits.chunk_steps if step <= count), default=1)
            if count < seq.num_new_tokens:
                scheduled[request_id] = seq, count - count % step

    def _take(
        self, seq: Sequence, budget: StepBudget, scheduled: dict[str, tuple[Sequence, int]], share: float = 1.0
    ) -> None:
        """Schedule more tokens of a prompt, whose blocks are reserved already: what a share of the budget holds."""
        before = scheduled.get(seq.request_id, (seq, 0))[1]
        wanted = min(seq.num_new_tokens, self.limits.max_chunk_tokens) - before
        count = budget.take(seq.num_computed_tokens, before, wanted, share)
        if count > 0:
            scheduled[seq.request_id] = seq, before + count

    def schedule_ahead(self, batch: Batch, *, with_prompts: bool) -> Batch | None:
        """The step after `batch`, which is running: what it samples tokens of goes on, unless it ends, and prompts that
        wait begin if `with_prompts`. None: the host must know more first.

        A sequence that ends in `batch` on a stop token is computed once too often; that token is discarded.
        """
        num_seqs, can_admit = len(batch.sequences), len(self._running) < self.limits.max_num_seqs and self._waiting
        if not num_seqs == len(self._running) == len(batch.samples):
            return None
        if can_admit and (not with_prompts or any(map(needs_host, self._waiting[:MAX_CANDIDATES]))):
            return None
        rows = [row for row, seq in enumerate(batch.sequences) if seq.num_output_tokens + 1 < seq.sampling.max_tokens]
        sequences = [batch.sequences[row] for row in rows]
        if not sequences or any(seq.is_finished or needs_host(seq) for seq in sequences):
            return None
        missing = [self._layout.num_blocks_of(seq.num_tokens + 1) - len(seq.block_ids) for seq in sequences]
        if sum(missing) > self.pool.num_free:
            return None
        for seq, count in zip(sequences, missing, strict=True):
            seq.block_ids += self.pool.allocate(count)
        started: dict[str, tuple[Sequence, int]] = {}
        if can_admit:
            num_free = self.limits.max_batched_tokens - len(sequences)
            self._admit(started, StepBudget(self.limits.prompt_cost, num_free, self._allowance(is_shared=True)), None)
            self._round_chunks(started)
        return Batch.of(list(started.values())).after(sequences, rows)

    def _reserve(self, seq: Sequence, scheduled: dict[str, tuple[Sequence, int]]) -> bool:
        """Give `seq` blocks for all its tokens, preempting younger sequences; False if it had to give way itself."""
        missing = self._layout.num_blocks_of(seq.num_tokens) - len(seq.block_ids)
        while missing > self.pool.num_free:
            victim = max(self._running, key=lambda other: other.order)
            self._preempt(victim)
            scheduled.pop(victim.request_id, None)
            if victim is seq:
                return False
        seq.block_ids += self.pool.allocate(missing)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._running.remove(seq)
        self._free_blocks(seq)
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        self.stats.count_preemption()
        self._wait(seq)

    def _admit(self, scheduled: dict[str, tuple[Sequence, int]], budget: StepBudget, left_over: int | None) -> None:
        """Move waiting sequences to running while all their tokens can be reserved.

        left_over: what the shortest running prompt that this step does not complete lacks; None: there is no such one

        In order, but for two exceptions: a sequence whose next prefix block is being computed right now waits to share
        it, and a prompt that this step would not complete waits until no shorter one is left over. Nobody passes the
        oldest once it has waited for `max_passed_over_s`.
        """
        in_progress = {
            seq.block_keys[seq.num_published_blocks]
            for seq in self._running
            if seq.num_published_blocks < len(seq.block_keys) and seq.num_new_tokens > 1
        }
        overdue = self._overdue()
        for seq in sorted(self._waiting, key=lambda seq: seq is not overdue)[:MAX_CANDIDATES]:  # stable
            if budget.is_spent or len(self._running) >= self.limits.max_num_seqs:
                break
            shared = self._cached_prefix(seq)
            is_shared_soon = len(shared) < len(seq.block_keys) and seq.block_keys[len(shared)] in in_progress
            if is_shared_soon and seq is not overdue:
                continue
            num_shared = len(shared) * self._layout.block_size
            lacking = seq.num_tokens - num_shared
            is_completed = lacking <= self.limits.max_chunk_tokens and budget.fits(num_shared, lacking)
            if not is_completed and left_over is not None and lacking >= left_over and seq is not overdue:
                continue
            missing = self._layout.num_blocks_of(seq.num_tokens) - len(shared)
            if self._running and missing + self.pool.num_evictable(shared) + self._reserve_blocks > self.pool.num_free:
                break
            self._start(seq, shared, missing)
            self._take(seq, budget, scheduled)
            if not is_completed:
                left_over = lacking
            if seq.num_published_blocks < len(seq.block_keys):
                in_progress.add(seq.block_keys[seq.num_published_blocks])

    def _overdue(self) -> Sequence | None:
        """The oldest waiting sequence, if it was passed over for too long: by priority, or by those that share."""
        oldest = min(self._waiting, key=lambda seq: seq.arrival_s, default=None)
        if oldest is None or time.monotonic() - oldest.arrival_s < self.limits.max_passed_over_s:
            return None
        return oldest

    @property
    def _reserve_blocks(self) -> int:
        """Blocks that running sequences may grow into; admitting into these would only cause the next preemption."""
        return max(1, min(len(self._running), int(self.pool.num_blocks * RESERVE_SHARE)))

    def _cached_prefix(self, seq: Sequence) -> list[int]:
        if not self.limits.prefix_caching:
            return []
        extend_keys(seq.block_keys, seq.root_key, seq.token_ids, self._layout.block_size)
        # The last token is always computed: its logits are what the next token is sampled from.
        return self.pool.find(seq.block_keys[: (seq.num_tokens - 1) // self._layout.block_size])

    def _start(self, seq: Sequence, shared: list[int], missing: int) -> None:
        self.pool.share(shared)
        seq.block_ids = shared + self.pool.allocate(missing)
        seq.num_published_blocks = len(shared)
        seq.num_computed_tokens = len(shared) * self._layout.block_size
        self._waiting.remove(seq)
        self._running.append(seq)
        if seq.scheduled_s is None:
            seq.scheduled_s = time.monotonic()
            seq.num_cached_tokens = seq.num_computed_tokens
            self.stats.record_admission(seq)

    def commit(self, batch: Batch, token_ids: Seq[int], logprobs: Seq[TokenLogprob | None]) -> list[TokenChunk]:
        """Account for a step that ran: `token_ids` and `logprobs` belong to the rows `batch.samples`, in order."""
        now = time.monotonic()
        sampled = dict(zip(batch.samples, zip(token_ids, logprobs, strict=True), strict=True))
        chunks = []
        for row, (seq, count) in enumerate(zip(batch.sequences, batch.num_new_tokens, strict=True)):
            if seq.is_finished:
                continue  # aborted while the step ran; its token is discarded
            self.stats.record_computed(seq, count)
            seq.num_computed_tokens += count
            self._publish(seq)
            if row in sampled:
                chunks.append(self._append(seq, *sampled[row], now))
        self.stats.count_step()
        return chunks

    def record_step_time(self, batch: Batch, step_s: float) -> None:
        """Account for how long a step took; before its commit."""
        self.stats.record_step_time(step_s, batch.num_tokens - batch.num_decodes)
        chunks = [pair for pair in zip(batch.sequences, batch.num_new_tokens, strict=True) if pair[1] > 1]
        cost = sum(self.limits.prompt_cost.of(seq.num_computed_tokens, count) for seq, count in chunks)
        self._pacer.record(cost, step_s)

    def _publish(self, seq: Sequence) -> None:
        if not self.limits.prefix_caching:
            return
        extend_keys(seq.block_keys, seq.root_key, seq.token_ids, self._layout.block_size)
        for index in range(seq.num_published_blocks, seq.num_computed_tokens // self._layout.block_size):
            self.pool.publish(seq.block_ids[index], seq.block_keys[index])
            seq.num_published_blocks = index + 1

    def _append(self, seq: Sequence, token_id: int, logprob: TokenLogprob | None, now: float) -> TokenChunk:
        seq.append(token_id)
        self.stats.record_token(seq, now)
        sampling = seq.sampling
        if seq.num_output_tokens > sampling.min_tokens:
            if token_id in sampling.stop_token_ids:
                self._finish(seq, "stop", token_id)
            elif token_id in self.limits.eos_token_ids and not sampling.ignore_eos:
                self._finish(seq, "stop")
        if not seq.is_finished and seq.num_output_tokens >= sampling.max_tokens:
            self._finish(seq, "length")
        return _chunk(seq, (token_id,), (logprob,) if logprob else None)

    def abort(self, request_id: str, reason: FinishReason = "abort", error: str | None = None) -> TokenChunk | None:
        """End a sequence at any moment and free its blocks; None if it is not here any more."""
        seq = self._sequences.get(request_id)
        if seq is None:
            return None
        self._finish(seq, reason)
        return _chunk(seq, (), None, error)

    def expire(self, now: float) -> list[TokenChunk]:
        """End the sequences whose deadline has passed."""
        late = [
            seq.request_id for seq in self._sequences.values() if seq.deadline_s is not None and now >= seq.deadline_s
        ]
        return [chunk for request_id in late if (chunk := self.abort(request_id, "deadline"))]

    def _finish(self, seq: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        seq.finish_reason = reason
        seq.stop_reason = stop_reason
        (self._running if seq in self._running else self._waiting).remove(seq)
        del self._sequences[seq.request_id]
        self._free_blocks(seq)
        self.stats.record_finish(seq, time.monotonic())

    def _free_blocks(self, seq: Sequence) -> None:
        self.pool.release(seq.block_ids)
        seq.block_ids = []
        seq.num_published_blocks = 0

    def reset(self) -> None:
        """Forget cached prefixes, counts and how long steps took, as if just started."""
        self.pool.clear_cached()
        self.stats = StatsRecorder()
        self._pacer = PrefillPacer(self.limits.max_batched_tokens, self.limits.max_step_s)
        self._shared_s = -math.inf

    def check_integrity(self) -> None:
        """Raise RuntimeError if blocks, tables and queues disagree. Tests call it after every step."""
        self.pool.check_integrity(seq.block_ids for seq in self._sequences.values())
        if len(self._waiting) + len(self._running) != len(self._sequences):
            raise RuntimeError("a sequence is in no queue, or in two")
        if any(seq.block_ids for seq in self._waiting):
            raise RuntimeError("a waiting sequence holds blocks")
        for seq in self._running:
            if len(seq.block_ids) < self._layout.num_blocks_of(seq.num_computed_tokens):
                raise RuntimeError(f"{seq.request_id} has computed more tokens than its blocks hold")


def _chunk(
    seq: Sequence, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] | None, error: str | None = None
) -> TokenChunk:
    return TokenChunk(
        request_id=seq.request_id,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
        num_prompt_tokens=seq.num_prompt_tokens,
        num_cached_tokens=seq.num_cached_tokens,
        num_output_tokens=seq.num_output_tokens,
        error=error,
    )
