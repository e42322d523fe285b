"""Short requests beside very long prompts on GPUs: in pools of their own, and all in one pool."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from app.bench.client import RequestRecord
from app.bench.load import Target, run_load
from app.bench.server import LocalServer, pools_config
from app.bench.summary import Latency
from app.bench.traffic import PlannedRequest, Uniform, plan, poisson
from app.errors import UnavailableError


@dataclass(frozen=True, slots=True)
class Mix:
    """Poisson shorts, and a long prompt every so often."""

    short_rate: float  # per second
    short_tokens: tuple[int, int]  # prompt, output
    long_tokens: tuple[int, int]
    long_every_s: float
    duration_s: float  # of each phase


GPU_MIX = Mix(short_rate=8.0, short_tokens=(512, 64), long_tokens=(65_536, 16), long_every_s=4.0, duration_s=20.0)
FIRST_LONG_S = 0.5
WARM_UP_SEED = 1_000_000
SETTLE_S = 5.0  # after the warm-up: idle engines capture what graphs they still lack


@dataclass(frozen=True, slots=True)
class Phase:
    """What one phase saw of shorts, and of longs if it had any."""

    short_ttft: Latency
    short_inter_token: Latency | None
    long_ttft: Latency | None
    num_failed: int

    def __str__(self) -> str:
        p50, p99 = (1e3 * self.short_ttft.percentiles_s[name] for name in ("p50", "p99"))
        line = f"{self.short_ttft.count} shorts: TTFT p50 {p50:.0f}, p99 {p99:.0f} ms"
        if self.long_ttft is not None:
            line += f"; {self.long_ttft.count} longs: TTFT p50 {self.long_ttft.percentiles_s['p50']:.2f} s"
        return line + (f"; {self.num_failed} FAILED" if self.num_failed else "")


def planned_requests(mix: Mix, seed: int, *, with_longs: bool) -> list[PlannedRequest]:
    """In order of departure; the shorts leave at the same moments with longs and without."""
    rng = random.Random(seed)
    (prompt, output), duration_s = mix.short_tokens, mix.duration_s
    shorts = plan(
        poisson(mix.short_rate, rng), Uniform(prompt, prompt), Uniform(output, output), rng,
        duration_s=duration_s, num_requests=None,
    )  # fmt: skip
    moments = takewhile(lambda at_s: at_s < duration_s, (FIRST_LONG_S + k * mix.long_every_s for k in count()))
    longs = [PlannedRequest(at_s, *mix.long_tokens) for at_s in moments] if with_longs else []
    return sorted([*shorts, *longs], key=lambda request: request.at_s)


def run_phase(url: str, mix: Mix, seed: int, *, with_longs: bool) -> Phase:
    """Raises UnavailableError if no short is answered."""
    planned = planned_requests(mix, seed, with_longs=with_longs)
    # Other prompts with longs than without: nothing is found cached.
    records = asyncio.run(run_load(planned, Target(url), seed=2 * seed + with_longs)).records
    shorts = [record for record in records if record.planned.prompt_tokens == mix.short_tokens[0]]
    longs = [record for record in records if record.planned.prompt_tokens == mix.long_tokens[0]]
    return phase_of(shorts, longs)


def _warm_up(url: str, mix: Mix) -> None:
    """A long and a few shorts: kernels that only they need are compiled. Raises UnavailableError if one fails."""
    planned = [PlannedRequest(0.0, *mix.long_tokens), *(PlannedRequest(0.2 * k, *mix.short_tokens) for k in range(5))]
    records = asyncio.run(run_load(planned, Target(url), seed=WARM_UP_SEED)).records
    if failed := [record.error for record in records if record.error is not None]:
        raise UnavailableError(f"a request failed while warming up: {failed[0]}")
    time.sleep(SETTLE_S)


def phase_of(shorts: list[RequestRecord], longs: list[RequestRecord]) -> Phase:
    answered = [record for record in shorts if record.error is None]
    ttft = Latency.of(record.ttft_s for record in answered)
    if ttft is None:
        raise UnavailableError(f"no short request was answered: {shorts[0].error if shorts else 'none was sent'}")
    return Phase(
        short_ttft=ttft,
        short_inter_token=Latency.of(record.inter_token_s for record in answered),
        long_ttft=Latency.of(record.ttft_s for record in longs if record.error is None),
        num_failed=sum(record.error is not None for record in (*shorts, *longs)),
    )


def one_pool_args(config: Path) -> dict[str, dict[str, Any]]:
    """All requests to the long pool, which takes as many at once as the short pool of the file; that one is idle."""
    pool = pools_config(config).short.model_dump(mode="json", exclude_unset=True)
    engine = {name: value for name, value in pool.get("engine", {}).items() if name != "max_model_len"}
    settings = {"short_max_cost_tokens": 1, "spills": False}
    return {"router": {"settings": settings}, "pools": {"long": {**pool, "engine": engine}}}


def mixed_rounds(
    config: Path, mix: Mix, runs: int, report: Callable[[str], None], *, in_one_pool: bool
) -> list[dict[str, Phase]]:
    """Of each round its phases `alone` and `beside`; in one pool `beside` only. On a server of its own."""
    phases = [("beside", True)] if in_one_pool else [("alone", False), ("beside", True)]
    rounds: list[dict[str, Phase]] = []
    with LocalServer(config, args=one_pool_args(config) if in_one_pool else None) as server:
        _warm_up(server.url, mix)
        for seed in range(runs):
            rounds.append({})
            for name, with_longs in phases:
                rounds[-1][name] = run_phase(server.url, mix, seed, with_longs=with_longs)
                report(f"{'one pool' if in_one_pool else 'two pools'}, {name}: {rounds[-1][name]}")
    return rounds


def p99_ratio(beside: list[dict[str, Phase]], alone: list[dict[str, Phase]]) -> float:
    """Of the shorts' time to first token; the median over the rounds."""
    return statistics.median(
        one["beside"].short_ttft.percentiles_s["p99"] / other["alone"].short_ttft.percentiles_s["p99"]
        for one, other in zip(beside, alone, strict=True)
    )
