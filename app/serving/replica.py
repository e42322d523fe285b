"""A pool's replica: a thin shell that puts an Engine behind Ray Serve."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ray import serve

from app.config import ModelSource, PoolConfig, PoolSettings, load_config
from app.errors import LongspanError
from app.protocol import EngineStats, GenerateRequest, TokenChunk
from app.serving.autoscaling import replica_stats
from app.serving.monitor import ReplicaReport
from app.serving.routing import PoolLimits, PoolName
from app.serving.shards import start_shards
from app.serving.signals import SignalMeter
from app.serving.streaming import Channel, Pacer, SequenceGroup, StreamItem
from app.tokenizer import Tokenizer

logger = logging.getLogger("ray.serve")

REPORT_PERIOD_S = 1.0
# The engine thread holds the GIL in short bursts between kernels; the default of 5 ms makes it wait for the event loop.
SWITCH_INTERVAL_S = 0.0005


class Replica:
    """The deployment class."""

    def __init__(self, pool: PoolName, source: ModelSource, config: PoolConfig) -> None:
        started_s = time.monotonic()
        self._pool = pool
        self._settings = config.settings
        try:
            self._shards = start_shards(config)
            # Imported here: the router and the controller never load torch, and other ranks do at the same time.
            from app.engine.loading import load_engine

            self._tokenizer = Tokenizer(source.folder)
            load = load_engine if self._shards is None else self._shards.load
            self._engine = load(source, config.engine)
        except LongspanError as error:
            # One line for the operator: Serve reports the last exception of the constructor.
            raise RuntimeError(f"{pool} pool: {type(error).__name__}: {error.message}") from None
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        # What is loaded by now stays. Each full collection would go through it, and stop every stream for 0.2 s.
        gc.collect()
        gc.freeze()
        self._engine.start()
        self._pacer = Pacer()
        self._channels: dict[str, Channel] = {}  # by router
        limits = self._engine.limits
        self._limits = PoolLimits(
            limits.max_model_len, limits.vocab_size, self._engine.version, limits.max_num_seqs, self._tokenizer.digest
        )
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._meter = SignalMeter(limits.max_num_seqs)
        self._start_s = time.monotonic() - started_s
        self._reporter = asyncio.create_task(self._report_forever())
        if self._shards is not None:
            self._shards.guard(self._engine, self._pacer)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take what may change at run time (PoolSettings)."""
        self._settings = load_config(PoolSettings, user_config, where="user_config")

    async def generate(
        self, requests: tuple[GenerateRequest, ...], router_id: str
    ) -> AsyncGenerator[StreamItem | LongspanError, None]:
        """Run the sequences of one prompt together: all or none are admitted; cancelling the call aborts them.

        Expected errors travel as items, because Serve logs a traceback for each exception.
        """
        group = SequenceGroup(requests, self._tokenizer, self._pacer)

        def find_channel() -> Channel | None:
            channel = self._channels.get(router_id)
            return channel if channel is not None and channel.is_open else None

        try:
            for request in requests:
                self._engine.validate(request)
            async with aclosing(group.run(self._engine, find_channel)) as items:
                async for item in items:
                    yield replace(item, replica_id=self._replica_id)
        except LongspanError as error:
            yield error

    async def channel(self, router_id: str, channel_id: str) -> AsyncGenerator[tuple[TokenChunk, ...], None]:
        """Carry the chunks of all this router's requests here; ends at once if it has a channel already."""
        if router_id in self._channels:
            return
        channel = self._channels[router_id] = Channel(channel_id, self._pacer)
        try:
            async with aclosing(channel.items()) as items:
                async for item in items:
                    yield item
        finally:
            del self._channels[router_id]
            channel.close()

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve hands to the scaling policy."""
        return replica_stats(self._meter.update(self._engine.stats(), time.monotonic()))

    def check_health(self) -> None:
        """Raises EngineError if the engine has stopped, or has work and makes no step."""
        self._engine.check_health(self._settings.watchdog_timeout_s)

    def __del__(self) -> None:
        # Serve calls this after the last stream has drained; Python does too, even where the constructor failed.
        if hasattr(self, "_reporter"):
            self._reporter.cancel()
            self._engine.stop()
            if self._shards is not None:
                self._shards.kill()

    async def _report_forever(self) -> None:
        context = serve.get_replica_context()
        monitor: Any = None
        while True:
            try:
                monitor = monitor or serve.get_deployment_handle("monitor", app_name=context.app_name)
                stats = self._engine.stats()
                replica_id = context.replica_id.unique_id
                await monitor.report.remote(ReplicaReport(self._pool, replica_id, self._limits, stats, self._start_s))
            except Exception as error:  # the monitor may restart; the next report finds its successor
                logger.warning("report to the monitor failed: %s", type(error).__name__)
            await asyncio.sleep(REPORT_PERIOD_S)
