"""What the mix on GPUs sends, what it concludes, and how one pool gets all of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from app.bench.client import RequestRecord
from app.bench.mixed_gpu import (
    GPU_MIX,
    Mix,
    Phase,
    one_pool_args,
    p99_ratio,
    phase_of,
    planned_requests,
    run_phase,
)
from app.bench.traffic import PlannedRequest
from app.config import EMBEDDED_MODEL, PoolsConfig, RouterConfig, load_config
from app.errors import UnavailableError
from tests.bench.sse_server import SseServer, serving

TWO_GPUS = Path(__file__).parents[2] / "serve_configs" / "two-gpus.yaml"


def test_shorts_leave_at_the_same_moments_with_longs_and_without() -> None:
    alone, beside = (planned_requests(GPU_MIX, 3, with_longs=longs) for longs in (False, True))
    longs = [request for request in beside if request.prompt_tokens == GPU_MIX.long_tokens[0]]
    assert [request for request in beside if request not in longs] == alone
    assert [request.at_s for request in longs] == [0.5, 4.5, 8.5, 12.5, 16.5]
    assert beside == sorted(beside, key=lambda request: request.at_s)
    assert 0.5 < len(alone) / (GPU_MIX.short_rate * GPU_MIX.duration_s) < 1.5


def test_a_phase_sends_what_is_planned_and_tells_shorts_from_longs() -> None:
    mix = Mix(short_rate=20.0, short_tokens=(8, 2), long_tokens=(64, 3), long_every_s=0.3, duration_s=1.0)

    async def run() -> tuple[Phase, Phase, list[Any]]:
        async with serving(SseServer()) as server:
            alone = await asyncio.to_thread(run_phase, server.url, mix, 0, with_longs=False)
            beside = await asyncio.to_thread(run_phase, server.url, mix, 0, with_longs=True)
            return alone, beside, server.bodies

    alone, beside, bodies = asyncio.run(run())
    assert alone.long_ttft is None and beside.long_ttft is not None
    assert beside.long_ttft.count == 2  # at 0.5 and 0.8 s
    assert alone.short_ttft.count == beside.short_ttft.count > 5
    prompts = [tuple(body["prompt"]) for body in bodies]
    assert len(set(prompts)) == len(prompts) == 2 * alone.short_ttft.count + 2  # nothing is found cached


def record(ttft_s: float, error: str | None = None) -> RequestRecord:
    made = RequestRecord(PlannedRequest(1.0, 8, 2), error=error)
    made.event_times_s.append(1.0 + ttft_s)
    return made


def test_a_phase_counts_what_failed_and_times_what_did_not() -> None:
    phase = phase_of([record(0.1), record(0.3), record(9.0, "disconnected")], [record(2.0), record(8.0, "timeout")])
    assert phase.short_ttft.count == 2
    assert phase.short_ttft.percentiles_s["p99"] == pytest.approx(0.298)
    assert phase.long_ttft is not None and phase.long_ttft.percentiles_s["p50"] == pytest.approx(2.0)
    assert phase.num_failed == 2
    with pytest.raises(UnavailableError, match="timeout"):
        phase_of([record(0.1, "timeout")], [])


def test_the_ratio_is_the_median_over_the_rounds() -> None:
    ttfts = [(0.1, 0.12), (0.1, 0.5), (0.2, 0.22)]
    rounds = [{"alone": phase_of([record(a)], []), "beside": phase_of([record(b)], [])} for a, b in ttfts]
    assert p99_ratio(rounds, rounds) == pytest.approx(1.2)


def test_one_pool_takes_everything_with_the_short_pools_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", str(EMBEDDED_MODEL))
    args = one_pool_args(TWO_GPUS)
    pools = load_config(PoolsConfig, args["pools"])
    assert (pools.long.engine.max_num_seqs, pools.long.engine.max_model_len, pools.long.num_gpus) == (128, None, 1)
    assert load_config(RouterConfig, args["router"]).settings.short_max_cost_tokens == 1
