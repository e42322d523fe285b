"""One prompt's way from a router to a replica of its pool, and to another one if the first is lost.

admitted --> held, while the pool has no replica --> sent to the chosen replica --> first token --> ... last token
   |                       ^                                     |
  429                      +------- lost before it began --------+
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass, replace

from app.config import RouterSettings
from app.errors import DeadlineExceededError, OverloadedError, ReplicaLostError, UnavailableError
from app.protocol import GenerateRequest, TokenChunk, join_chunks
from app.serving.admission import check_queue
from app.serving.board import PoolDecision
from app.serving.demand import ZeroGate
from app.serving.monitor import PoolTraffic, ReplicaReport
from app.serving.pool_client import PoolClient
from app.serving.pool_view import PoolView, Ticket
from app.serving.responses import timed_out
from app.serving.routing import (
    OutputEstimates,
    PoolLoad,
    PoolName,
    PrefixDirectory,
    PrefixKey,
    ReplicaLoad,
    choose_replica,
    prefix_keys,
)
from app.serving.scaling_view import PoolStart

logger = logging.getLogger("ray.serve")

INFORMED_S = 10.0  # after that long without the monitor, Serve chooses the replica
LOST_S = 10.0  # a lost replica is not tried again for so long: by then its last report is forgotten
ABSENT_S = 2.0  # nor one that Serve does not send to: it drains, or is about to come up
NO_REPLICA_RETRY_S = 5.0
EXPECTED_S = 0.1  # between the choice of a pool and the ticket
RECHECK_S = 1.0  # of what is held, while no snapshot comes

Items = AsyncGenerator[list[TokenChunk], None]


@dataclass(frozen=True, slots=True)
class PromptRun:
    """The `n` sequences of one prompt; they run on one replica and share its prefix cache."""

    pool: PoolName
    requests: tuple[GenerateRequest, ...]
    bucket: PoolName  # whose output estimate learns from it
    prompt_text: str = ""  # echoed
    is_streamed: bool = True  # False: nothing leaves before the end, so that a loss on the way can be made good
    is_spilled: bool = False
    # Prompts of one HTTP request in one pool are admitted with the first, so that they do not refuse each other: these;
    # None: it is one of them.
    followers: tuple[PromptRun, ...] | None = ()

    @classmethod
    def together(cls, runs: Sequence[PromptRun]) -> list[PromptRun]:
        """The runs of one HTTP request, each pool's first with the others as its followers."""
        first = {run.pool: run for run in reversed(runs)}
        return [
            replace(run, followers=tuple(other for other in runs if other.pool == run.pool and other is not run))
            if run is first[run.pool]
            else replace(run, followers=None)
            for run in runs
        ]


class Dispatcher:
    """A router's side of one pool. For one event loop."""

    def __init__(
        self,
        pool: PoolName,
        client: PoolClient,
        gate: ZeroGate,
        settings: Callable[[], RouterSettings],
        estimates: OutputEstimates,
        on_hold: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_hold` is told of each prompt that finds no replica."""
        self._pool = pool
        self._client = client
        self._settings = settings
        self._estimates = estimates
        self._on_hold = on_hold
        self._view = PoolView()
        self.gate = gate
        self._directory = PrefixDirectory()
        self._informed_s = -INFORMED_S
        self._expecting_until_s = 0.0
        self._counts: Counter[str] = Counter()
        self._holds_ended: Counter[str] = Counter()  # by reason

    def update(
        self,
        reports: Sequence[tuple[float, ReplicaReport]],
        decision: PoolDecision | None = None,
        start: PoolStart | None = None,
    ) -> None:
        """Take the monitor's snapshot of this pool. A replica about to stop reports on, but takes nothing more."""
        now = asyncio.get_running_loop().time()
        self.gate.update(decision, start, now)
        self._view.update(reports if self.gate.is_open else (), now)
        self._informed_s = now

    def load(self) -> PoolLoad:
        now = asyncio.get_running_loop().time()
        load = self._view.load(now)
        return replace(load, running_seqs=max(1, load.running_seqs)) if now < self._expecting_until_s else load

    def expect(self) -> None:
        """A request was given to this pool because it is idle: until that one shows, it is not idle for the next."""
        self._expecting_until_s = asyncio.get_running_loop().time() + EXPECTED_S

    @property
    def traffic(self) -> PoolTraffic:
        held = self._view.held.num_seqs or int(self.gate.is_wanted(asyncio.get_running_loop().time()))
        return PoolTraffic(router_requests_held=held, router_holds_ended=dict(self._holds_ended), **self._counts)

    async def generate(self, run: PromptRun, deadline_s: float | None) -> Items:
        """Each item holds at most one chunk per sequence. Closing it aborts them.

        Raises OverloadedError if too much waits, UnavailableError if the pool has no replica for too long or the
        replica is lost after the first token, DeadlineExceededError if the deadline passes meanwhile.
        """
        request = run.requests[0]
        keys = prefix_keys(request.prompt_token_ids, request.cache_salt)
        with closing(self._admit(run, keys)) as ticket:
            num_retries = 0
            while True:
                replica_id = await self._find_replica(run, keys, ticket, deadline_s)
                has_begun = False
                try:
                    async with aclosing(self._attempt(run, replica_id, ticket, deadline_s, num_retries)) as items:
                        async for item in items:
                            has_begun = True
                            yield item
                    return
                except UnavailableError as error:
                    if replica_id is not None:
                        self._avoid(replica_id, LOST_S if isinstance(error, ReplicaLostError) else ABSENT_S)
                    if has_begun or num_retries >= self._settings().max_retries:
                        self._counts["router_requests_lost"] += len(run.requests)
                        raise
                    logger.warning("%s pool: sent again: %s", self._pool, error.message)
                num_retries += 1
                self._counts["router_retries"] += len(run.requests)

    def _admit(self, run: PromptRun, keys: Sequence[PrefixKey]) -> Ticket:
        if run.followers is not None:
            self._check_queue(run, run.followers, keys)
        if run.is_spilled:
            self._counts["router_requests_spilled"] += len(run.requests)
        return Ticket(self._view, len(run.requests), len(run.requests[0].prompt_token_ids))

    def _check_queue(self, run: PromptRun, followers: Sequence[PromptRun], keys: Sequence[PrefixKey]) -> None:
        num_seqs, new_tokens = len(run.requests), self._num_new_tokens(run.requests[0], keys)
        for other in followers:
            request = other.requests[0]
            num_seqs += len(other.requests)
            new_tokens += self._num_new_tokens(request, prefix_keys(request.prompt_token_ids, request.cache_salt))
        settings = self._settings()
        try:
            check_queue(self.load(), num_seqs, new_tokens, settings.short if self._pool == "short" else settings.long)
        except OverloadedError:
            self._counts["router_requests_rejected"] += num_seqs
            self._counts["router_tokens_rejected"] += new_tokens
            raise

    def _num_new_tokens(self, request: GenerateRequest, keys: Sequence[PrefixKey]) -> int:
        return len(request.prompt_token_ids) - self._directory.find(keys).num_tokens

    async def _find_replica(
        self, run: PromptRun, keys: Sequence[PrefixKey], ticket: Ticket, deadline_s: float | None
    ) -> str | None:
        """The replica to send to, or None where Serve is to choose: the monitor is silent, and nobody is known."""
        num_tokens = len(run.requests[0].prompt_token_ids)
        replicas = self._replicas() or await self._hold(run, ticket, deadline_s)
        if not replicas:
            return None
        match = self._directory.find(keys)
        replica_id = choose_replica(replicas, random.random(), match.holders, other_chance=random.random())
        self._directory.record(keys, replica_id)
        ticket.send(replica_id, num_tokens - match.num_tokens * (replica_id in match.holders))
        return replica_id

    def _replicas(self) -> list[ReplicaLoad]:
        return self._view.replicas(asyncio.get_running_loop().time())

    async def _hold(self, run: PromptRun, ticket: Ticket, deadline_s: float | None) -> list[ReplicaLoad]:
        """Keep a prompt here until the pool has replicas: those. None of them if only Serve can say who there is.

        Serve must never choose for a pool at zero, also while the monitor is silent: it would start a replica by
        itself, whatever the budget says.
        """
        loop = asyncio.get_running_loop()
        held_until_s = loop.time() + self._settings().max_hold_s
        reason = "client_left"
        self._on_hold()
        try:
            while not (replicas := self._replicas()):
                if loop.time() - self._informed_s >= INFORMED_S and not self.gate.is_asleep:
                    break
                self.gate.check(held_until_s if deadline_s is None else min(deadline_s, held_until_s), loop.time())
                ticket.hold(len(run.requests[0].prompt_token_ids))
                await self._wait_for_replica(held_until_s, deadline_s)
            reason = "replica" if replicas else "silent_monitor"
            return replicas
        except DeadlineExceededError:
            reason = "deadline"
            raise
        except UnavailableError:
            reason = "max_hold" if loop.time() >= held_until_s else "late_start"
            raise
        finally:
            self._holds_ended[reason] += len(run.requests)

    async def _wait_for_replica(self, held_until_s: float, deadline_s: float | None) -> None:
        """Until the next snapshot, or a while. Raises UnavailableError or DeadlineExceededError when the time is up."""
        loop = asyncio.get_running_loop()
        end_s = held_until_s if deadline_s is None else min(held_until_s, deadline_s)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(min(end_s, loop.time() + RECHECK_S)):
                await self._view.wait_for_update()
        if loop.time() < end_s:
            return
        if end_s == deadline_s:
            raise timed_out()
        raise UnavailableError(f"the {self._pool} pool has no replica", retry_after_s=NO_REPLICA_RETRY_S)

    async def _attempt(
        self, run: PromptRun, replica_id: str | None, ticket: Ticket, deadline_s: float | None, num_retries: int
    ) -> Items:
        """Run it on one replica. Raises LongspanError."""
        now = asyncio.get_running_loop().time()
        requests, names = run.requests, {}
        if num_retries:
            # A lost replica's channel may still bring tokens: they must not pass for those of the next one.
            names = {f"{request.request_id}-again-{num_retries}": request.request_id for request in requests}
            requests = tuple(replace(request, request_id=name) for request, name in zip(requests, names, strict=True))
        if deadline_s is not None:
            if deadline_s <= now:
                raise timed_out()
            # What is left is all that another process can use: clocks differ.
            requests = tuple(replace(request, timeout_s=deadline_s - now) for request in requests)

        def taken(by_replica_id: str) -> None:
            ticket.send(by_replica_id, 0)
            if replica_id is not None and replica_id != by_replica_id:
                self._avoid(replica_id, ABSENT_S)

        held: dict[str, TokenChunk] = {}
        async with aclosing(self._client.generate(requests, replica_id, taken)) as items:
            async for item in items:
                if names:
                    item = [replace(chunk, request_id=names[chunk.request_id]) for chunk in item]
                self._observe(run.bucket, item)
                if run.is_streamed:
                    yield item
                    continue
                for chunk in item:
                    earlier = held.get(chunk.request_id)
                    held[chunk.request_id] = chunk if earlier is None else join_chunks([earlier, chunk])
        if held:
            yield list(held.values())

    def _observe(self, bucket: PoolName, item: Sequence[TokenChunk]) -> None:
        for chunk in item:
            if chunk.finish_reason in ("stop", "length"):
                was_cut = chunk.finish_reason == "length"
                self._estimates.observe(bucket, chunk.num_output_tokens, was_cut=was_cut)

    def _avoid(self, replica_id: str, duration_s: float) -> None:
        self._view.avoid(replica_id, asyncio.get_running_loop().time() + duration_s)
