"""The monitor's part in scaling: what the policy must be told, and what it decided."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from app.config import PoolScalingSettings, ScalingSettings
from app.serving import board
from app.serving.autoscaling import monitor_stats
from app.serving.board import PoolDecision
from app.serving.load import Demand, PoolScaling
from app.serving.routing import POOLS, PoolName
from app.serving.scaling import ScalingConfig

logger = logging.getLogger("ray.serve")

READ_PERIOD_S = 0.5  # of the policy's decisions
STALE_AFTER_S = 10.0
SHOWN_S = 2.0  # by then the board shows a new replica, and routers send to it
REJECTION_WINDOW_S = 5.0  # time constant of the rate of refused tokens; after twice as long without any it is 0


@dataclass(frozen=True, slots=True)
class PoolStart:
    """How long requests wait that find no replica of a pool."""

    cold_start_s: float  # from the first request that waited to the replica, as measured last
    waited_s: float  # since the first of those that wait now came
    timeout_s: float  # after which a start has failed


@dataclass(frozen=True, slots=True)
class RouterDemand:
    """What one router has for a pool besides what it sends on."""

    held_seqs: int  # wait in the router because the pool has no replica
    rejected_tokens: int  # so far


class ScalingView:
    """Every `now` is of one clock that runs evenly. Pools without settings do not scale and are left out."""

    def __init__(self) -> None:
        self._settings: dict[PoolName, PoolScalingSettings] = {}
        self._config = ScalingConfig({})
        self._decisions: dict[PoolName, PoolDecision] = {}
        self._stamp = -math.inf  # of the decisions
        self._stamp_s = -math.inf  # when it changed
        self._known: set[PoolName] = set()  # pools that had a replica
        self._renewed_s: dict[PoolName, float] = {}  # when a replica reported for the first time
        self._start_s: dict[PoolName, float] = {}  # of the engine alone
        self._cold_start_s: dict[PoolName, float] = {}
        self._waking_since_s: dict[PoolName, float] = {}
        self._held: dict[PoolName, int] = {}
        self._held_since_s: dict[PoolName, float] = {}
        self._rejected: dict[tuple[str, PoolName], int] = {}  # by router, as last reported
        self._rejected_since: dict[PoolName, int] = defaultdict(int)
        self._rejected_per_s: dict[PoolName, float] = defaultdict(float)
        self._rejected_s: dict[PoolName, float] = {}  # when it last grew
        self._rated_s = -math.inf

    def configure(self, settings: ScalingSettings) -> None:
        pools = {name: one for name in POOLS if (one := getattr(settings, name)) is not None}
        self._settings = pools
        budget = math.inf if settings.budget is None else settings.budget
        self._config = ScalingConfig(
            {name: PoolScaling(**one.model_dump()) for name, one in pools.items()}, budget, STALE_AFTER_S
        )

    @property
    def is_active(self) -> bool:
        return bool(self._settings)

    def hear_start(self, pool: PoolName, start_s: float, now: float) -> None:
        """Take a replica's first report; later ones may be those of a replica on its way out."""
        self._known.add(pool)
        self._renewed_s[pool] = now
        self._start_s[pool] = start_s
        self._cold_start_s.setdefault(pool, start_s)
        self._end_wait(pool, now)

    def hear_routers(self, routers: Mapping[str, Mapping[PoolName, RouterDemand]], now: float) -> None:
        """Take what every router said last."""
        self._held = {
            name: sum(pools[name].held_seqs for pools in routers.values() if name in pools) for name in self._settings
        }
        self._held_since_s = {name: self._held_since_s.get(name, now) for name, held in self._held.items() if held}
        for name, since_s in self._held_since_s.items():
            decision, renewed_s = self.decisions(now).get(name), self._renewed_s.get(name, -math.inf)
            # Routers hold on a little after a replica has come: no new wait.
            if (decision is None or decision.running == 0) and now - renewed_s >= SHOWN_S:
                self._waking_since_s.setdefault(name, since_s if since_s > renewed_s else now)
        rejected = {
            (router, name): one.rejected_tokens for router, pools in routers.items() for name, one in pools.items()
        }
        for (router, name), total in rejected.items():
            # A router's first report may tell of long ago.
            if (more := total - self._rejected.get((router, name), total)) > 0:
                self._rejected_since[name] += more
                self._rejected_s[name] = now
        self._rejected = rejected

    def stats(self, num_alive: Mapping[PoolName, int], now: float) -> dict[str, float]:
        """For `record_autoscaling_stats`: settings and demand. num_alive: replicas that report, by pool."""
        elapsed_s = now - self._rated_s
        if elapsed_s > 0:
            part = 1.0 - math.exp(-elapsed_s / REJECTION_WINDOW_S)
            for name in self._settings:
                rate = self._rejected_since.pop(name, 0) / elapsed_s if math.isfinite(elapsed_s) else 0.0
                self._rejected_per_s[name] += part * (rate - self._rejected_per_s[name])
            self._rated_s = now
        for name in set(self._settings) - self._known:
            self._waking_since_s.setdefault(name, now)
        return monitor_stats(self._config, {name: self._demand(name, num_alive, now) for name in self._settings})

    def _demand(self, name: PoolName, num_alive: Mapping[PoolName, int], now: float) -> Demand:
        # A pool that nobody has heard of is started once: routers must learn what it takes.
        held = self._held.get(name, 0) or (0 if name in self._known else 1)
        is_rejecting = now - self._rejected_s.get(name, -math.inf) < 2 * REJECTION_WINDOW_S
        return Demand(held, self._rejected_per_s[name] if is_rejecting else 0.0, num_alive.get(name, 0))

    def decisions(self, now: float) -> dict[PoolName, PoolDecision]:
        """What the policy last decided, nothing if that is long ago."""
        return self._decisions if now - self._stamp_s < STALE_AFTER_S else {}

    def starts(self, now: float) -> dict[PoolName, PoolStart]:
        return {
            name: PoolStart(
                self._cold_start_s.get(name, 0.0), now - self._waking_since_s.get(name, now), one.start_timeout_s
            )
            for name, one in self._settings.items()
        }

    def take(self, posted: tuple[float, Mapping[str, PoolDecision]] | None, now: float) -> None:
        """Take what is on the board."""
        if posted is None or posted[0] == self._stamp:
            return
        self._stamp, self._stamp_s = posted[0], now
        self._decisions = {name: posted[1][name] for name in POOLS if name in posted[1]}
        for name, one in self._decisions.items():
            if one.running:
                self._end_wait(name, now)

    async def read_forever(self, app: str, clock: Callable[[], float]) -> None:
        while True:
            try:
                self.take(await asyncio.to_thread(board.read, app), clock())
            except Exception as error:  # the control store may restart
                logger.warning("the scaling policy's decisions cannot be read: %s", type(error).__name__)
            await asyncio.sleep(READ_PERIOD_S)

    def _end_wait(self, pool: PoolName, now: float) -> None:
        since_s = self._waking_since_s.pop(pool, None)
        if since_s is not None:
            self._cold_start_s[pool] = max(now - since_s, self._start_s.get(pool, 0.0))
