"""A router's side of one pool: requests go out as calls, their tokens come back by few shared channels.

    generate call: first tokens, "moved to channel X", then silent until the request ends; cancelling it aborts
    channel call:  items with the chunks of several of this router's requests on one replica

A call names its replica, and the channel that its tokens come by is opened to that same one. Where Serve picks another
(see NamedReplicaRouter), a replica that has a channel already ends the second one at once. To a pool whose last replica
stops none is opened: Serve would start a replica for it.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from ray import serve
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError

from app.errors import EngineError, LongspanError, OverloadedError, ReplicaLostError, UnavailableError
from app.protocol import GenerateRequest, TokenChunk
from app.serving.demand import ZeroGate
from app.serving.routing import PoolName

logger = logging.getLogger("ray.serve")

CHANNEL_RETRY_S = 0.1
LAST_TOKENS_TIMEOUT_S = 5.0  # after a call has ended, for what its channel still carries

Inbox = asyncio.Queue[list[TokenChunk] | LongspanError]


class PoolClient:
    def __init__(self, app: str, pool: PoolName, gate: ZeroGate) -> None:
        self._name = f"{app}/{pool}"
        self._gate = gate
        self._handle: Any = serve.get_deployment_handle(pool, app_name=app)
        self._router_id = uuid.uuid4().hex
        self._inboxes: dict[str, Inbox] = {}  # by request id
        self._channels: dict[str, set[Inbox]] = {}  # open ones, and who depends on them
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_attempts_s: dict[str, float] = {}  # to open a channel, by replica

    async def generate(
        self, requests: Sequence[GenerateRequest], replica_id: str | None, on_taken: Callable[[str], None]
    ) -> AsyncGenerator[list[TokenChunk], None]:
        """Run the sequences of one prompt on one replica; each item holds at most one chunk per sequence.

        `on_taken` is told which replica it is before the first item: another one if that of `replica_id` takes no
        calls, or if it is None. Closing it aborts the sequences. Raises LongspanError, whatever went wrong below.
        """
        inbox: Inbox = asyncio.Queue()
        call: Any = None
        watcher: asyncio.Task[None] | None = None
        num_open = len(requests)
        try:
            self._inboxes.update((request.request_id, inbox) for request in requests)
            call = self._call("generate", replica_id, tuple(requests), self._router_id)
            async for item in self._own_items(call, inbox, num_open, on_taken):
                num_open -= _num_finished(item)
                yield item
            watcher = self._start(self._watch(call, inbox))
            while num_open:
                received = await inbox.get()
                if isinstance(received, LongspanError):
                    raise received
                num_open -= _num_finished(received)
                yield received
        finally:
            for request in requests:
                self._inboxes.pop(request.request_id, None)
            for dependants in self._channels.values():
                dependants.discard(inbox)
            # A call whose sequences have all finished ends by itself.
            if num_open:
                if watcher is not None:
                    watcher.cancel()
                if call is not None:
                    call.cancel()

    def _call(self, method: str, replica_id: str | None, *arguments: Any) -> Any:
        try:
            handle = self._handle.options(method_name=method, stream=True, session_id=replica_id or "")
            # A context of its own: Serve would give all calls of one request the same id, and cancel them with it.
            return contextvars.Context().run(handle.remote, *arguments)
        except Exception as error:
            raise self._translated(error) from None

    async def _own_items(
        self, call: Any, inbox: Inbox, num_open: int, on_taken: Callable[[str], None]
    ) -> AsyncGenerator[list[TokenChunk], None]:
        """What comes by the request's own stream, until its `num_open` sequences end or it moves to a channel."""
        try:
            is_first = True
            async for item in call:
                if isinstance(item, LongspanError):
                    raise item
                if is_first and item.replica_id:
                    on_taken(item.replica_id)
                is_first = False
                if item.moved_to is not None:
                    if item.moved_to not in self._channels:
                        raise UnavailableError("the stream from the replica broke")
                    self._channels[item.moved_to].add(inbox)
                else:
                    self._try_to_open_channel(item.replica_id)
                num_open -= _num_finished(item.chunks)
                if item.chunks:
                    yield list(item.chunks)
                if item.moved_to is not None:
                    return
            if num_open:
                raise UnavailableError("the replica ended the stream early")
        except Exception as error:
            raise self._translated(error) from None

    async def _watch(self, call: Any, inbox: Inbox) -> None:
        """Read the request's own stream to its end, to pass on a failure that comes by it after it moved."""
        try:
            async for item in call:
                if isinstance(item, LongspanError):
                    inbox.put_nowait(item)
        except RequestCancelledError:
            pass  # mostly by us
        except Exception as error:
            inbox.put_nowait(self._translated(error))
            return
        # The last tokens may still be on their way by the channel.
        await asyncio.sleep(LAST_TOKENS_TIMEOUT_S)
        inbox.put_nowait(UnavailableError("the replica ended the stream early"))

    def _try_to_open_channel(self, replica_id: str) -> None:
        now_s = asyncio.get_running_loop().time()
        if not self._gate.is_open or now_s < self._next_attempts_s.get(replica_id, 0.0):
            return
        self._next_attempts_s = {key: until_s for key, until_s in self._next_attempts_s.items() if until_s > now_s}
        self._next_attempts_s[replica_id] = now_s + CHANNEL_RETRY_S
        self._start(self._read_channel(replica_id))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        # The event loop itself holds tasks only weakly.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _read_channel(self, replica_id: str) -> None:
        channel_id = uuid.uuid4().hex
        call: Any = None
        loss = UnavailableError("the stream from the replica broke")
        # Registered first: a request may move here before the channel's first item has come.
        self._channels[channel_id] = set()
        try:
            call = self._call("channel", replica_id, self._router_id, channel_id)
            async for chunks in call:
                self._deliver(chunks)
        except Exception as error:
            logger.warning("%s: a stream broke: %s", self._name, type(error).__name__)
            if _is_loss(error):
                loss = ReplicaLostError(loss.message)
        finally:
            for inbox in self._channels.pop(channel_id, ()):
                inbox.put_nowait(loss)
            if call is not None:
                call.cancel()

    def _deliver(self, chunks: Sequence[TokenChunk]) -> None:
        by_inbox: dict[Inbox, list[TokenChunk]] = defaultdict(list)
        for chunk in chunks:
            # A request that was aborted meanwhile has none.
            with suppress(KeyError):
                by_inbox[self._inboxes[chunk.request_id]].append(chunk)
        for inbox, received in by_inbox.items():
            inbox.put_nowait(received)

    def _translated(self, error: Exception) -> LongspanError:
        if isinstance(error, LongspanError):
            return error
        if isinstance(error, BackPressureError):
            return OverloadedError(f"{self._name}: the queue is full")
        if _is_loss(error):
            logger.warning("%s: %s", self._name, type(error).__name__)
            return ReplicaLostError(f"{self._name}: a replica was lost")
        logger.error("%s: %s", self._name, error)
        return EngineError(f"{self._name}: a replica failed")


def _is_loss(error: Exception) -> bool:
    """Whether the replica has gone, by what Ray and Serve raise: large items lie on its node and go with that."""
    return isinstance(error, (RayActorError, NodeDiedError, ObjectLostError, DeploymentUnavailableError))


def _num_finished(chunks: Sequence[TokenChunk]) -> int:
    return sum(chunk.finish_reason is not None for chunk in chunks)
