"""Whether a router takes one more request: places for all of them, and what may wait for one pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from app.config import QueueBounds
from app.errors import OverloadedError
from app.serving.routing import PoolLoad

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0


class ConcurrencyLimit:
    """Counts the requests in flight through one router."""

    def __init__(self, max_ongoing: Callable[[], int]) -> None:
        self._max_ongoing = max_ongoing
        self.num_ongoing = 0

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold a place while the request runs. Raises OverloadedError if none is free."""
        if self.num_ongoing >= self._max_ongoing():
            raise OverloadedError(f"{self.num_ongoing} requests are already in progress", retry_after_s=1.0)
        self.num_ongoing += 1
        try:
            yield
        finally:
            self.num_ongoing -= 1


class Admission:
    """Middleware of the routes that cost something: the place is held until the answer's last byte is out."""

    def __init__(self, app: ASGIApp, limit: ConcurrencyLimit) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._limit.admit():
            await self._app(scope, receive, send)


def check_queue(load: PoolLoad, num_seqs: int, num_prefill_tokens: int, bounds: QueueBounds) -> None:
    """Raise OverloadedError if the prompts of an HTTP request would wait too long.

    Its `retry_after_s` is when there will be room for them. What nothing waits before always goes in, and while the
    speed is not known only the number counts.
    """
    num_replicas = max(1, load.num_replicas)
    excess_seqs = load.waiting_seqs + num_seqs - bounds.max_waiting_seqs * num_replicas
    if load.waiting_seqs and excess_seqs > 0:
        wait_s = excess_seqs / load.admitted_seqs_per_s if load.admitted_seqs_per_s else MIN_RETRY_AFTER_S
        raise OverloadedError(f"{load.waiting_seqs} sequences are waiting already", retry_after_s=_bounded(wait_s))
    if not load.waiting_prefill_tokens or not load.prefill_tokens_per_s:
        return
    speed = load.prefill_tokens_per_s * num_replicas
    excess_s = (load.waiting_prefill_tokens + num_prefill_tokens) / speed - bounds.max_ttft_s
    if excess_s > 0:
        raise OverloadedError(
            f"{load.waiting_prefill_tokens} prompt tokens are waiting already", retry_after_s=_bounded(excess_s)
        )


def _bounded(wait_s: float) -> float:
    return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, wait_s))
