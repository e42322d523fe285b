"""Whether a router takes one more request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from app.errors import OverloadedError


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
