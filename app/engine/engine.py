"""One engine: a thread that steps over the scheduled sequences, and async streams of what it produces.

`Engine.step` is the loop: schedule, forward, sample, commit. A lock guards the scheduler's books; it is never held
while the model runs, so adding, aborting and asking for stats never wait for a step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field, replace

import torch

from app.engine.batch import Batch
from app.engine.runner import Runner
from app.engine.sampler import PendingSample, Sampler
from app.engine.scheduler import Scheduler
from app.errors import DeadlineExceededError, EngineError, RankLostError, ReplicaLostError
from app.protocol import EngineStats, FinishReason, GenerateRequest, TokenChunk, join_chunks

logger = logging.getLogger(__name__)
MAX_FAILED_STEPS = 3  # in a row; then the engine is dead, not unlucky
IDLE_WAIT_S = 0.01
# Each stream that wakes takes the interpreter from the engine's thread: the more there are, the more rarely they do.
MIN_DELIVERY_PERIOD_S, MAX_DELIVERY_PERIOD_S, STREAM_PERIOD_S = 0.02, 0.1, 0.001
EARLY_DELIVERY_S = 0.01  # streams due within it come along when one is due: one wake-up for all of them


@dataclass(slots=True)
class _Stream:
    """Where a sequence's chunks go: a queue that belongs to the caller's event loop."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[TokenChunk]
    next_delivery_s: float = 0.0
    undelivered: list[TokenChunk] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose tokens the device may still be computing."""

    batch: Batch
    sample: PendingSample
    start_s: float
    previous: PendingSample | None = None  # that of the step it was launched ahead of


class Engine:
    def __init__(self, scheduler: Scheduler, runner: Runner, sampler: Sampler, *, version: str) -> None:
        self.version = version
        self.limits = scheduler.limits
        self._scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self._streams: dict[str, _Stream] = {}
        self._changed = threading.Condition()  # its lock guards the scheduler and the streams
        self._launched: _Launched | None = None
        self._batch = Batch((), (), ())  # the one launched last
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._fatal: str | None = None
        self._last_progress_s = time.monotonic()

    def step(self) -> list[TokenChunk]:
        """Run one step; returns what it produced, in no particular order. Needs no thread and no event loop.

        Schedule, forward and sample make up a launch. On a device the next step is launched before this one's tokens
        are on the host, wherever nothing depends on them, so that commit and schedule cost no device time.
        """
        with self._changed:
            expired = self._scheduler.expire(time.monotonic())
        if expired:
            return expired  # at once: what follows may fail
        launched, self._launched = self._launched, None
        if launched is None or all(seq.is_finished for seq in launched.batch.sequences):
            launched = self._launch_next()
        if launched is None:
            return []
        self._launched = self._launch_ahead(launched)
        sampled = launched.sample.wait()
        with self._changed:
            self._scheduler.record_step_time(launched.batch, self._step_s(launched))
            self._last_progress_s = time.monotonic()
            return self._scheduler.commit(launched.batch, sampled.token_ids, sampled.logprobs)

    def _step_s(self, launched: _Launched) -> float:
        """How long a step took that has just ended: one launched ahead began when the one before ended."""
        step_s = launched.sample.seconds_after(launched.previous) if launched.previous else None
        if step_s is None:
            step_s = time.monotonic() - max(launched.start_s, self._last_progress_s)
        return step_s

    def _launch_next(self) -> _Launched | None:
        with self._changed:
            batch = self._scheduler.schedule()
            if batch is None:
                self._changed.wait(IDLE_WAIT_S)  # nothing fits right now; an abort or a deadline will change that
        if batch is None:
            self._runner.keep_alive()
            return None
        return self._launch(batch)

    def _launch_ahead(self, launched: _Launched) -> _Launched | None:
        if not self._runner.can_run_ahead:
            return None
        with self._changed:
            batch = self._scheduler.schedule_ahead(launched.batch, with_prompts=self._runner.can_mix_ahead)
        return self._launch(batch, launched.sample) if batch else None

    def _launch(self, batch: Batch, previous: PendingSample | None = None) -> _Launched:
        self._batch = batch
        start_s = time.monotonic()
        logits = self._runner.forward(batch, previous.token_ids if previous else None)
        rows = batch.samples
        if len(rows) < len(batch.sequences):
            logits = _select_rows(logits, rows)
        sequences = [batch.sequences[row] for row in rows]
        sample = self._sampler.launch(logits, sequences, num_pending=len(batch.previous_rows))
        return _Launched(batch, sample, start_s, previous)

    def _run(self) -> None:
        failures = 0
        while True:
            try:
                if not self._await_work():
                    return
                self._deliver(self.step())
                failures = 0
            except RankLostError as error:  # no step will ever succeed again
                logger.error("the engine ends: %s", error.message)
                self.fail(error.message)
                return
            except Exception as error:
                self._launched = None
                failures += 1
                logger.exception("engine step failed (%d in a row)", failures)
                self._fail(
                    [seq.request_id for seq in self._batch.sequences], f"engine step failed: {type(error).__name__}"
                )
                if failures == MAX_FAILED_STEPS:
                    self.fail(f"{MAX_FAILED_STEPS} engine steps in a row failed, last: {type(error).__name__}: {error}")
                    return

    def _await_work(self) -> bool:
        """Prepare the runner while there is nothing to do; False once the engine is to stop."""
        is_prepared = False
        while True:
            with self._changed:
                if is_prepared:
                    self._changed.wait_for(
                        lambda: self._scheduler.has_work or self._stopping, self._runner.beat_period_s
                    )
                if self._scheduler.has_work or self._stopping:
                    return not self._stopping
            self._runner.keep_alive()
            is_prepared = not self._runner.capture_next()

    def _fail(self, request_ids: Iterable[str], message: str) -> None:
        """End these requests with an error, and every stream whose last chunk a failing step may have swallowed."""
        with self._changed:
            chunks = [self._scheduler.abort(request_id, "error", message) for request_id in request_ids]
            lost = self._streams.keys() - set(self._scheduler.request_ids)
            chunks += [TokenChunk(request_id, (), finish_reason="error", error=message) for request_id in lost]
        self._deliver([chunk for chunk in chunks if chunk])

    def _deliver(self, chunks: list[TokenChunk]) -> None:
        """Hand chunks to their streams: first and last ones at once, those between a period apart, as one."""
        per_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, list[TokenChunk]]]] = defaultdict(list)
        now = time.monotonic()
        with self._changed:
            period_s = min(MAX_DELIVERY_PERIOD_S, max(MIN_DELIVERY_PERIOD_S, STREAM_PERIOD_S * len(self._streams)))
            for chunk in chunks:
                stream = self._streams.get(chunk.request_id)
                if stream is not None:
                    stream.undelivered.append(chunk)
                    if _is_urgent(chunk):
                        stream.next_delivery_s = 0.0
            waiting = [stream for stream in self._streams.values() if stream.undelivered]
            if any(stream.next_delivery_s <= now for stream in waiting):
                due = [stream for stream in waiting if stream.next_delivery_s <= now + EARLY_DELIVERY_S]
                for stream in sorted(due, key=lambda stream: stream.next_delivery_s):
                    per_loop[stream.loop].append((stream, stream.undelivered))
                    stream.undelivered, stream.next_delivery_s = [], now + period_s
        for loop, pairs in per_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_put_all, pairs)

    def _raise_failure(self, chunk: TokenChunk) -> None:
        if chunk.error is not None and chunk.error == self._fatal:
            raise ReplicaLostError(chunk.error)  # it was not this request's step: another replica can serve it
        if chunk.num_output_tokens:
            return
        if chunk.finish_reason == "deadline":
            raise DeadlineExceededError("the deadline passed before the first token")
        if chunk.finish_reason == "error":
            raise EngineError(chunk.error or "the engine failed")

    @property
    def has_work(self) -> bool:
        with self._changed:
            return self._scheduler.has_work

    def warm_up(self, *, is_complete: bool = False) -> None:
        """Prepare what every step needs at least, or all there is: for an engine whose thread has not started."""
        self._runner.warm_up()
        self._sampler.warm_up(self._runner.device, self.limits.vocab_size)
        while is_complete and self._runner.capture_next():
            pass

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="longspan-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step; streams still open end with ReplicaLostError."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread:
            self._thread.join()
        self.fail("the engine was stopped")
        self._runner.stop()

    def fail(self, message: str) -> None:
        """Declare the engine dead, from any thread and even while a step hangs; streams end with ReplicaLostError.

        The first reason stays: a lost rank is noticed by the engine's thread and by who watches the rank.
        """
        with self._changed:
            reason = self._fatal = self._fatal or message
            request_ids = self._scheduler.request_ids
        self._fail(request_ids, reason)

    def validate(self, request: GenerateRequest) -> None:
        """Raise the error `generate` would end in at once; changes nothing."""
        with self._changed:
            self._scheduler.validate(request)

    def add(self, request: GenerateRequest) -> None:
        """Queue a request without a stream: for loops that call `step` themselves. Raises RequestError."""
        with self._changed:
            self._scheduler.add(request)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream a request's chunks, of one step or several; the last one has a finish_reason.

        Closing the iterator or cancelling its task aborts the request and frees its blocks at once.
        Raises RequestError or OverloadedError before the first chunk, DeadlineExceededError if the deadline passes
        before any token, EngineError if its step fails before any token; ReplicaLostError whenever the engine dies.
        """
        stream = _Stream(asyncio.get_running_loop(), asyncio.Queue())
        with self._changed:
            if self._fatal:
                raise ReplicaLostError(self._fatal)
            if not self._scheduler.has_work:
                self._last_progress_s = time.monotonic()
            self._scheduler.add(request)
            self._streams[request.request_id] = stream
            self._changed.notify_all()
        try:
            while True:
                chunk = await stream.queue.get()
                self._raise_failure(chunk)
                yield chunk
                if chunk.finish_reason:
                    return
        finally:
            self.abort(request.request_id)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        """Forget a request, whatever its state; its blocks are free when this returns. Unknown ids are ignored.

        `reason` is what the statistics count it as: a stop string, found outside the engine, is "stop".
        """
        with self._changed:
            self._streams.pop(request_id, None)
            self._scheduler.abort(request_id, reason)

    def stats(self) -> EngineStats:
        expert_tokens = self._runner.expert_counts.snapshot()
        with self._changed:
            return replace(
                self._scheduler.snapshot(),
                expert_tokens=expert_tokens,
                weight_bytes_read=self._runner.weight_bytes_read,
            )

    def check_health(self, stall_s: float = 60.0) -> None:
        """Raise EngineError if the thread is gone, or if work has waited `stall_s` seconds without a step."""
        with self._changed:
            has_work = self._scheduler.has_work
        if self._fatal:
            raise EngineError(self._fatal)
        if self._thread and not self._thread.is_alive():
            raise EngineError("the engine thread has ended")
        if has_work and time.monotonic() - self._last_progress_s > stall_s:
            raise EngineError(f"no step for {stall_s:g} s while requests wait")

    def reset(self) -> None:
        """Forget cached prefixes and counts, as if just started. For an engine without work."""
        with self._changed:
            self._scheduler.reset()
        self._runner.expert_counts.reset()

    def check_integrity(self) -> None:
        with self._changed:
            self._scheduler.check_integrity()


def _select_rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """logits[rows], without waiting for the device."""
    index = torch.tensor(rows, dtype=torch.int64)
    if logits.is_cuda:
        index = index.pin_memory().to(logits.device, non_blocking=True)
    return logits.index_select(0, index)


def _is_urgent(chunk: TokenChunk) -> bool:
    return chunk.finish_reason is not None or chunk.num_output_tokens == len(chunk.token_ids)


def _put_all(pairs: list[tuple[_Stream, list[TokenChunk]]]) -> None:
    for stream, chunks in pairs:
        stream.queue.put_nowait(join_chunks(chunks))
