"""Named scenarios: each starts what it needs, measures one promise, and stops what it started."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.bench.client import Client, PromptMaker, RequestRecord
from app.bench.server import LOCAL_CONFIG, LocalServer, pools_config
from app.bench.traffic import PlannedRequest
from app.errors import ConfigError

MEGABYTE = 2**20
SHARDED_CONFIG = Path("serve_configs/local-sharded.yaml")
AUTOSCALE_CONFIG = Path("serve_configs/autoscale.yaml")
TWO_GPUS_CONFIG = Path("serve_configs/two-gpus.yaml")


@dataclass(frozen=True, slots=True)
class ScenarioOptions:
    config: Path | None  # None: the scenario's own
    url: str | None  # a server that runs already; the scenario starts its own if None
    runs: int | None  # None: the scenario's own
    report: Callable[[str], None]


Scenario = Callable[[ScenarioOptions], dict[str, Any]]


def cancel(options: ScenarioOptions) -> dict[str, Any]:
    """50 streams cancelled at once, five times over: seconds until every block is free again, without new traffic.

    The limit is 1 s each time. On --url the cluster must be the one this machine belongs to, because the replicas
    themselves are asked.
    """
    from app.bench.cancel import cancel_rounds  # ray

    runs = options.runs or 5
    if options.url is not None:
        rounds = asyncio.run(cancel_rounds(options.url, "auto", runs, options.report))
    else:
        with LocalServer(options.config or LOCAL_CONFIG) as server:
            rounds = asyncio.run(cancel_rounds(server.url, server.ray_address, runs, options.report))
    worst_s = max(math.inf if round_.freed_s is None else round_.freed_s for round_ in rounds)
    return {"passed": worst_s <= 1.0, "worst_s": worst_s, "rounds": rounds}


def cold_start(options: ScenarioOptions) -> dict[str, Any]:
    """`serve run` from nothing: seconds to the first streamed token, median of the runs. The limit is 40 s."""
    times = []
    for index in range(options.runs or 3):
        server = LocalServer(_own_server(options, "cold-start"))
        start_s = time.perf_counter()
        try:
            server.launch()
            asyncio.run(_wait_first_token(server))
            times.append(time.perf_counter() - start_s)
        finally:
            server.stop()
        options.report(f"run {index + 1}: first token after {times[-1]:.1f} s")
    median_s = statistics.median(times)
    return {"passed": median_s <= 40.0, "median_s": median_s, "runs_s": times}


def memory(options: ScenarioOptions) -> dict[str, Any]:
    """Unique memory (USS) of every process of the cluster, idle and after 16 streams. The limit is 4 GB."""
    runs = []
    for index in range(options.runs or 1):
        with LocalServer(_own_server(options, "memory")) as server:
            idle_bytes = server.unique_memory_bytes()
            asyncio.run(_stream_together(server.url, streams=16, output_tokens=64))
            used_bytes = server.unique_memory_bytes()
            processes = len(server.processes())
        options.report(
            f"run {index + 1}: {processes} processes, {idle_bytes / MEGABYTE:.0f} MiB idle,"
            f" {used_bytes / MEGABYTE:.0f} MiB after 16 streams"
        )
        runs.append({"processes": processes, "idle_bytes": idle_bytes, "used_bytes": used_bytes})
    worst_bytes = max(max(run["idle_bytes"], run["used_bytes"]) for run in runs)
    return {"passed": worst_bytes <= 4e9, "worst_bytes": worst_bytes, "runs": runs}


def shard_faults(options: ScenarioOptions) -> dict[str, Any]:
    """Ranks killed, frozen and made to raise under load: seconds to the next answer, what is left, five times over.

    Limits: 20 s after a kill or an error, 25 s after a stopped rank, 40 s after a stopped rank 0; no process, placement
    group or GPU memory in use may be left, streams end with an error event, all else is sent again.
    """
    from app.bench.shard_faults import CPU_LOAD, FAULTS, GPU_LOAD, fault_runs  # ray

    config = _own_server(options, "shard-faults", SHARDED_CONFIG)
    load = GPU_LOAD if pools_config(config).short.num_gpus else CPU_LOAD
    rounds, starts_s = [], []
    for index in range(options.runs or 5):
        start_s = time.perf_counter()
        with LocalServer(config) as server:
            starts_s.append(time.perf_counter() - start_s)
            options.report(f"round {index + 1}, all pools started in {starts_s[-1]:.1f} s")
            rounds.append(asyncio.run(fault_runs(server.url, server.ray_address, options.report, FAULTS, load)))
    is_passed = all(run.is_passed for round_ in rounds for run in round_)
    return {"passed": is_passed, "starts_s": starts_s, "rounds": rounds}


def mixed(options: ScenarioOptions) -> dict[str, Any]:
    """Short requests' time to first token beside long ones in the other pool, over the same without the long ones.

    Three alternating rounds of 100 shorts; without longs, a spinner takes the time of the long pool's core. Limits:
    median <= 1.3x, 95th percentile <= 1.6x.
    """
    from app.bench.mixed import compare

    with LocalServer(_own_server(options, "mixed")) as server:
        ratios = compare(server, "long", options.runs or 3)
    options.report(f"median {ratios.median_ratio:.2f}x, 95th percentile {ratios.p95_ratio:.2f}x")
    is_passed = ratios.median_ratio <= 1.3 and ratios.p95_ratio <= 1.6 and not ratios.num_failed
    return {"passed": is_passed, "num_failed": ratios.num_failed, "comparison": ratios}


def mixed_alone(options: ScenarioOptions) -> dict[str, Any]:
    """The same with long and short requests in one replica, without a second pool: both must be served.

    Limits: the shorts' 95th percentile <= 3x, and a long prompt takes at most four times as long as alone.
    """
    from app.bench.mixed import compare, long_alone_s

    # All to the long pool, whose steps are as short as those of a pool for everybody must be: who comes waits for one.
    engine = {"max_num_seqs": 16, "max_step_s": 0.1, "max_batched_tokens": 512}
    args = _local_args(long=engine, settings={"short_max_cost_tokens": 1})
    with LocalServer(_own_server(options, "mixed-alone"), args=args) as server:
        alone_s = asyncio.run(long_alone_s(server.url))
        ratios = compare(server, "short", options.runs or 3)
    slowdown = ratios.slowest_long_s / alone_s
    options.report(f"95th percentile {ratios.p95_ratio:.2f}x, longs {slowdown:.2f}x of {alone_s:.1f} s alone")
    is_passed = ratios.p95_ratio <= 3.0 and slowdown <= 4.0 and not ratios.num_failed
    return {
        "passed": is_passed,
        "num_failed": ratios.num_failed,
        "long_alone_s": alone_s,
        "long_slowdown": slowdown,
        "comparison": ratios,
    }


def mixed_gpu(options: ScenarioOptions) -> dict[str, Any]:
    """Shorts beside prompts of 64k tokens on two GPUs, a pool on each, and then all in one pool on one GPU.

    8 shorts of 512 tokens a second, a long prompt every 4 s; medians over the rounds of what the shorts' 99th
    percentile of time to first token is of that without longs. The limit, for two pools: 1.2x.
    """
    from app.bench.mixed_gpu import GPU_MIX, mixed_rounds, p99_ratio

    config, runs = _own_server(options, "mixed-gpu", TWO_GPUS_CONFIG), options.runs or 3
    two_pools = mixed_rounds(config, GPU_MIX, runs, options.report, in_one_pool=False)
    ratio = p99_ratio(two_pools, two_pools)
    options.report(f"two pools: TTFT p99 {ratio:.2f}x of alone")
    one_pool = mixed_rounds(config, GPU_MIX, runs, options.report, in_one_pool=True)
    one_pool_ratio = p99_ratio(one_pool, two_pools)
    options.report(f"one pool: TTFT p99 {one_pool_ratio:.2f}x of alone")
    num_failed = sum(phase.num_failed for phases in (*two_pools, *one_pool) for phase in phases.values())
    return {
        "passed": ratio <= 1.2 and not num_failed,
        "p99_ratio": ratio,
        "one_pool_p99_ratio": one_pool_ratio,
        "num_failed": num_failed,
        "two_pools": two_pools,
        "one_pool": one_pool,
    }


def affinity(options: ScenarioOptions) -> dict[str, Any]:
    """64 prompts that share 512 tokens, at once, over three replicas: how evenly they spread and how much is cached.

    Limits: the busiest replica gets at most 1.5 times the mean, half of the shared tokens come from the cache.
    """
    from app.bench.affinity import burst

    replicas, runs = 3, []
    with LocalServer(_own_server(options, "affinity"), args=_local_args(num_replicas=replicas)) as server:
        server.wait_replicas("short", replicas)
        for seed in range(options.runs or 3):
            runs.append(asyncio.run(burst(server.url, "short", replicas, seed)))
            options.report(f"run {seed + 1}: {runs[-1]}")
    worst = max(run.max_over_mean for run in runs), min(run.cached_share for run in runs)
    is_passed = worst[0] <= 1.5 and worst[1] >= 0.5 and not any(run.failed for run in runs)
    return {"passed": is_passed, "max_over_mean": worst[0], "cached_share": worst[1], "runs": runs}


def replica_kill(options: ScenarioOptions) -> dict[str, Any]:
    """A replica killed under load, one of two and then the only one: what had not begun is answered, nothing hangs."""
    from app.bench.replica_kill import kill_under_load

    results: dict[str, list[Any]] = {}
    for replicas in (2, 1):
        args = _local_args(num_replicas=replicas, short={"max_num_seqs": 4}, settings={"spills": False})
        with LocalServer(_own_server(options, "replica-kill"), args=args) as server:
            for seed in range(options.runs or 3):
                server.wait_replicas("short", replicas)

                def victim(server: LocalServer = server) -> Any:
                    return server.replica_processes("short")[0]

                run = asyncio.run(kill_under_load(server.url, victim, seed))
                results.setdefault(f"one of {replicas}", []).append(run)
                options.report(f"one of {replicas} killed: {run}")
    return {"passed": all(run.is_passed for runs in results.values() for run in runs), **results}


def overload(options: ScenarioOptions) -> dict[str, Any]:
    """Three times what a replica can serve, for 25 s: throughput >= 0.8 of its peak, 429s answered within 300 ms (p99).

    Every accepted request finishes, and two seconds after the last has ended one is accepted again. Nothing spills
    to the other pool: on the same two cores its replica would add no capacity, and take the first one's time.
    """
    from app.bench.overload import overload_run

    runs = []
    settings = {"short": {"max_waiting_seqs": 24}, "spills": False}
    with LocalServer(_own_server(options, "overload"), args=_local_args(settings=settings)) as server:
        for seed in range(options.runs or 3):
            runs.append(asyncio.run(overload_run(server.url, seed)))
            options.report(f"run {seed + 1}: {runs[-1]}")
    ratio = statistics.median(run.throughput_ratio for run in runs)
    p99_s = statistics.median(run.refusal_p99_s for run in runs)
    accepted = all(run.accepted_again_s is not None and run.accepted_again_s <= 2.0 and not run.errors for run in runs)
    return {
        "passed": ratio >= 0.8 and p99_s <= 0.3 and accepted,
        "throughput_ratio": ratio,
        "refusal_p99_s": p99_s,
        "runs": runs,
    }


def scale_up(options: ScenarioOptions) -> dict[str, Any]:
    """Overload: seconds to the decision (limit 2), to the second replica (limit 10), back to one; and from zero.

    Medians of the runs; none may lose a request or move the other pool. `idle_start_s` is how long the same start takes
    while nothing else goes on.
    """
    from app.bench.scale_up import QUICK_SCALING, scale_up_runs  # ray

    config = _own_server(options, "scale-up", AUTOSCALE_CONFIG)
    with LocalServer(config, args={"pools": {"scaling": QUICK_SCALING}}) as server:
        runs = asyncio.run(scale_up_runs(server.url, server.ray_address, options.runs or 3, options.report))
    decision_s = statistics.median(load.decision_s for _, load in runs)
    running_s = statistics.median(load.running_s for _, load in runs)
    is_whole = all(load.num_failed == 0 and not load.has_other_moved for _, load in runs)
    is_woken = all(zero.first_token_s is not None for zero, _ in runs)
    return {
        "passed": decision_s <= 2.0 and running_s <= 10.0 and is_whole and is_woken,
        "decision_s": decision_s,
        "running_s": running_s,
        "idle_start_s": statistics.median(zero.start_s for zero, _ in runs),
        "runs": [{"from_zero": zero, "overload": load} for zero, load in runs],
    }


def _local_args(
    *,
    num_replicas: int = 1,
    short: dict[str, Any] | None = None,
    long: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Fields of serve_configs/local.yaml for a scenario: replicas of the short pool, limits, the router's settings."""
    engine = {"device": "cpu", "num_threads": 1}
    pools = {
        "short": {
            "num_cpus": 0.2,
            "num_replicas": num_replicas,
            "engine": {**engine, "max_model_len": 4096, **(short or {})},
        },
        "long": {"num_cpus": 0.2, "engine": {**engine, "max_num_seqs": 4, **(long or {})}},
    }
    return {"pools": pools, "router": {"settings": settings or {}}}


def sharing_plans(options: ScenarioOptions) -> dict[str, Any]:
    """What two ranks add to a step of eight sequences: the plan broadcast, laid out and synced. The limit is 1 ms."""
    from app.bench.plan_share import plan_share  # torch

    return plan_share(2, options.runs or 3, options.report)


SCENARIOS: dict[str, Scenario] = {
    "affinity": affinity,
    "cancel": cancel,
    "cold-start": cold_start,
    "memory": memory,
    "mixed": mixed,
    "mixed-alone": mixed_alone,
    "mixed-gpu": mixed_gpu,
    "overload": overload,
    "replica-kill": replica_kill,
    "scale-up": scale_up,
    "shard-faults": shard_faults,
    "plan-share": sharing_plans,
}


def summary_line(scenario: Scenario) -> str:
    """The first line of the scenario's docstring."""
    return (scenario.__doc__ or "").strip().splitlines()[0]


def _own_server(options: ScenarioOptions, name: str, default: Path = LOCAL_CONFIG) -> Path:
    if options.url is not None:
        raise ConfigError(f"--url: {name} starts its own server", field="--url")
    return options.config or default


async def _wait_first_token(server: LocalServer) -> None:
    """Ask for a streamed token until one comes. Raises PreflightError if the server ends."""
    planned = PlannedRequest(0.0, 16, 1)
    body = PromptMaker(None, stream=True, seed=0).body(planned)
    async with Client(server.url, timeout_s=10.0) as client:
        while True:
            server.check_alive()
            record = RequestRecord(planned)
            await client.send(body, record, time.perf_counter())
            if record.event_times_s:
                return
            await asyncio.sleep(0.05)


async def _stream_together(url: str, *, streams: int, output_tokens: int) -> None:
    planned = PlannedRequest(0.0, 64, output_tokens)
    prompts = PromptMaker(None, stream=True, seed=0)
    start_s = time.perf_counter()
    async with Client(url, timeout_s=120.0) as client:
        sends = (client.send(prompts.body(planned), RequestRecord(planned), start_s) for _ in range(streams))
        await asyncio.gather(*sends)
