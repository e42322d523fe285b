"""A router's side of a pool that may have no replica: whether to hold requests back, and whether holding can help.

They wait in the router (see Dispatcher), never in Serve's handle: Serve would start a replica by itself, whatever the
budget says. The next report to the monitor tells of them, the scaling policy starts a replica, and they go on.
"""

from __future__ import annotations

from app.errors import UnavailableError
from app.serving.board import PoolDecision
from app.serving.routing import PoolName
from app.serving.scaling_view import PoolStart

UNPLACED_RETRY_S = 60.0  # at most what a client is told to wait for a replica that no node has room for


class ZeroGate:
    """One pool's. Every `now` is of the router's event loop."""

    def __init__(self, pool: PoolName) -> None:
        self._pool = pool
        self._decision: PoolDecision | None = None
        self._start: PoolStart | None = None
        self._told_s = 0.0
        self._wanted_until_s = 0.0

    def update(self, decision: PoolDecision | None, start: PoolStart | None, now: float) -> None:
        """Take what the monitor said: None for a pool that does not scale, or of which the policy says nothing."""
        self._decision, self._start, self._told_s = decision, start, now

    @property
    def is_open(self) -> bool:
        """Requests may go to the pool's handle. True as well where nobody could say."""
        return self._decision is None or self._decision.takes_requests

    @property
    def is_asleep(self) -> bool:
        """The pool has no replica because nobody needs one."""
        return self._decision is not None and self._decision.granted == 0

    def is_wanted(self, now: float) -> bool:
        """A client that was told to come back should find a replica."""
        return not self.is_open and now < self._wanted_until_s

    def check(self, deadline_s: float, now: float) -> None:
        """Raises UnavailableError, which says when to come back, if a request cannot be served in time."""
        if self.is_open or self._decision is None:
            return
        next_try_s = self._decision.values.get("next_try_s")
        if next_try_s is not None:
            message = f"no node has room for a replica of the {self._pool} pool"
            raise UnavailableError(message, retry_after_s=min(next_try_s, UNPLACED_RETRY_S))
        if self._start is None:
            return
        waited_s = self._start.waited_s + (now - self._told_s if self._start.waited_s else 0.0)
        expected_s = self._start.cold_start_s - waited_s
        if now + expected_s > deadline_s:
            # Twice as long: the client may be late, and so may the replica.
            self._wanted_until_s = now + 2.0 * expected_s
            message = f"the {self._pool} pool has no replica, and one takes about {expected_s:.0f} s more to start"
            raise UnavailableError(message, retry_after_s=expected_s)
