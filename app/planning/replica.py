"""An engine in virtual time: the scheduler's rules over a cost model instead of a model."""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import deque
from dataclasses import dataclass, field

from app.planning.cost_model import ReplicaCost
from app.planning.trace import TraceRequest
from app.protocol import EngineStats, Histogram
from app.serving.routing import PoolName


@dataclass(slots=True)
class SimulatedRequest:
    """A request on its way; times are virtual seconds, None until they happen."""

    request: TraceRequest
    bucket: PoolName
    pool: PoolName  # where it was sent
    order: int  # of arrival
    sent_s: float | None = None  # to the replica
    started_s: float | None = None  # its first step
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    # the replica's books
    prompt_left: int = field(init=False)  # tokens to compute before the next token comes
    outputs_left: int = field(init=False)
    joined_step: int = 0  # the decoding step at which it held `context` tokens
    context: int = 0  # tokens in the cache
    finish_step: int = 0

    def __post_init__(self) -> None:
        self.prompt_left = self.request.num_prompt_tokens
        self.outputs_left = self.request.num_output_tokens


class SimulatedReplica:
    """Steps decoding sequences first, then prompt chunks in order, as the engine does. Memory is counted in tokens.

    waiting --admit--> prefilling --last chunk--> decoding --> finished
       ^                   |                         |
       +----- preempt -----+-------------------------+
    """

    def __init__(self, cost: ReplicaCost, now: float) -> None:
        self.cost = cost
        self.clock = now
        self.finished: list[SimulatedRequest] = []  # since the caller last cleared it
        self.num_preemptions = 0
        self.peak_kv_tokens = 0
        self._inbox: deque[SimulatedRequest] = deque()  # sent, not yet seen: the replica is in the middle of a step
        self._waiting: list[SimulatedRequest] = []
        self._prefilling: list[SimulatedRequest] = []
        self._decoding: list[tuple[int, int, SimulatedRequest]] = []  # heap by the step at which they finish
        self._num_decoding = 0
        self._step = 0
        self._context = 0  # of decoding sequences, in sum
        self._reserved = 0  # of prefilling sequences
        self._tokens_in_hand = 0
        self._tokens_computed = 0
        self._num_finished = self._num_started = 0
        self._queue_s = 0.0

    @property
    def kv_tokens(self) -> int:
        return self._context + self._reserved

    @property
    def is_empty(self) -> bool:
        return not (self._inbox or self._waiting or self._prefilling or self._num_decoding)

    def oldest_waiting_s(self, now: float) -> float:
        waiting = [*self._waiting, *self._inbox]
        return max((now - one.sent_s for one in waiting if one.sent_s is not None), default=0.0)

    def add(self, one: SimulatedRequest, now: float) -> None:
        one.sent_s = now
        self._inbox.append(one)
        self._tokens_in_hand += one.prompt_left

    def stats(self) -> EngineStats:
        return EngineStats(
            num_requests_running=len(self._prefilling) + self._num_decoding,
            num_requests_waiting=len(self._waiting) + len(self._inbox),
            num_waiting_prefill_tokens=self._tokens_in_hand,
            num_blocks=self.cost.kv_capacity_tokens,
            num_free_blocks=self.cost.kv_capacity_tokens - self.kv_tokens,
            prefill_tokens_computed=self._tokens_computed,
            request_success={"length": self._num_finished},
            request_queue_time_seconds=Histogram((), (self._num_started,), self._queue_s),
        )

    def advance(self, until: float) -> None:
        """Run steps until `until`; the last one may end a little later."""
        while self.clock < until:
            while self._inbox and (self._inbox[0].sent_s or 0.0) <= self.clock:
                insort(self._waiting, self._inbox.popleft(), key=_queue_order)
            self._make_room()
            self._admit()
            if self._prefilling:
                self._run_chunks()
            elif self._num_decoding:
                self._decode(self._steps_until(until))
            else:
                self.clock = min(until, self._inbox[0].sent_s or 0.0) if self._inbox else until

    def _admit(self) -> None:
        while self._waiting and len(self._prefilling) + self._num_decoding < self.cost.max_running_seqs:
            one, num_running = self._waiting[0], len(self._prefilling) + self._num_decoding
            # Running sequences keep a token each in hand, or admission would only cause the next preemption.
            if num_running and self.kv_tokens + one.prompt_left + num_running + 1 > self.cost.kv_capacity_tokens:
                return
            self._waiting.pop(0)
            self._reserved += one.prompt_left
            one.context = one.prompt_left
            self._prefilling.append(one)
            if one.started_s is None:
                one.started_s = self.clock
                self._num_started += 1
                self._queue_s += self.clock - (one.sent_s or 0.0)

    def _make_room(self) -> None:
        """Preempt the youngest until every decoding sequence can store one more token."""
        while self.kv_tokens + self._num_decoding > self.cost.kv_capacity_tokens:
            victim = max([*self._prefilling, *(item[2] for item in self._decoding)], key=lambda one: one.order)
            if victim in self._prefilling:
                self._prefilling.remove(victim)
                self._reserved -= victim.context
                self._tokens_in_hand += victim.context - victim.prompt_left
                victim.prompt_left = victim.context
            else:
                victim.outputs_left = victim.finish_step - self._step
                victim.prompt_left = victim.context + self._step - victim.joined_step
                self._tokens_in_hand += victim.prompt_left
                self._decoding = [item for item in self._decoding if item[2] is not victim]
                heapq.heapify(self._decoding)
                self._leave(victim)
            victim.num_preemptions += 1
            self.num_preemptions += 1
            insort(self._waiting, victim, key=_queue_order)

    def _run_chunks(self) -> None:
        """One step: a token for every decoding sequence, and a chunk of each prompt that the step has room for."""
        budget = self.cost.max_batched_tokens - self._num_decoding
        total, done = 0, []
        for one in self._prefilling:
            count = min(one.prompt_left, self.cost.max_chunk_tokens, budget - total)
            one.prompt_left -= count
            total += count
            if one.prompt_left == 0:
                done.append(one)
        self._tokens_computed += total
        self._tokens_in_hand -= total
        self.clock += self.cost.step_s(total, self._num_decoding, self._context)
        self._step += 1
        self._context += self._num_decoding
        self._finish()
        for one in done:
            self._prefilling.remove(one)
            self._reserved -= one.context
            self._join(one)
        self.peak_kv_tokens = max(self.peak_kv_tokens, self.kv_tokens)

    def _join(self, one: SimulatedRequest) -> None:
        """The prompt is computed: its last row gives a token, the rest come one a step."""
        if one.first_token_s is None:
            one.first_token_s = self.clock
        one.outputs_left -= 1
        if one.outputs_left == 0:
            self._end(one)
            return
        one.joined_step = self._step
        one.finish_step = self._step + one.outputs_left
        heapq.heappush(self._decoding, (one.finish_step, one.order, one))
        self._num_decoding += 1
        self._context += one.context

    def _steps_until(self, until: float) -> int:
        """How many steps in a row change nothing but the sequences' lengths; at least 1."""
        target = min(until, self._inbox[0].sent_s or 0.0) if self._inbox else until
        step_s = self.cost.step_s(0, self._num_decoding, self._context)
        free = (self.cost.kv_capacity_tokens - self.kv_tokens) // self._num_decoding
        return max(1, min(math.ceil((target - self.clock) / step_s), self._decoding[0][0] - self._step, free))

    def _decode(self, num_steps: int) -> None:
        self.clock += self.cost.decode_s(num_steps, self._num_decoding, self._context)
        self._step += num_steps
        self._context += num_steps * self._num_decoding
        self.peak_kv_tokens = max(self.peak_kv_tokens, self.kv_tokens)
        self._finish()

    def _finish(self) -> None:
        while self._decoding and self._decoding[0][0] <= self._step:
            _, _, one = heapq.heappop(self._decoding)
            self._leave(one)
            self._end(one)

    def _leave(self, one: SimulatedRequest) -> None:
        self._num_decoding -= 1
        self._context -= one.context + self._step - one.joined_step

    def _end(self, one: SimulatedRequest) -> None:
        one.finished_s = self.clock
        self._num_finished += 1
        self.finished.append(one)

    def check_integrity(self) -> None:
        """Raise RuntimeError if the sums and the sequences disagree, or the cache holds more than it can."""
        context = sum(one.context + self._step - one.joined_step for _, _, one in self._decoding)
        reserved = sum(one.context for one in self._prefilling)
        in_hand = sum(one.prompt_left for one in (*self._inbox, *self._waiting, *self._prefilling))
        if (context, reserved, in_hand) != (self._context, self._reserved, self._tokens_in_hand):
            raise RuntimeError("the replica's sums do not match its sequences")
        if max(self.kv_tokens, self.peak_kv_tokens) > self.cost.kv_capacity_tokens:
            raise RuntimeError("the KV cache holds more than its capacity")


def _queue_order(one: SimulatedRequest) -> tuple[bool, int]:
    return one.num_preemptions == 0, one.order
