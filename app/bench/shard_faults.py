"""Ranks of a sharded pool killed, frozen and made to fail under load: how soon it answers again, and what is left."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psutil  # type: ignore[import-untyped]
import ray
from ray.util import list_named_actors
from ray.util.placement_group import placement_group_table

from app.bench.client import Client, PromptMaker, RequestRecord
from app.bench.cluster import join_cluster
from app.bench.gpu_memory import gpu_memory_bytes, is_freed
from app.bench.traffic import PlannedRequest
from app.errors import UnavailableError
from app.serving.rank import Rank

APP, POOL = "pools", "short"
STREAMS = 3  # that have begun when the fault comes
WHOLE = 2  # that have begun likewise, but are not streamed: they are made again
LOAD_ATTEMPTS = 10  # for a machine that stands still while this process would strike
PROBE = PlannedRequest(0.0, 8, 1)
PROBE_PERIOD_S = 0.25
START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 120.0
CLEAN_TIMEOUT_S = 60.0  # after the first answer: a frozen rank 0 has its grace period
REPORTED_S = 2.5  # by then routers have heard of a request that runs
_POLL_S = 0.05
GPU_SLACK_BYTES = 4 * 2**30  # for what steps allocate; a rank's weights and cache are far larger


@dataclass(frozen=True, slots=True)
class Load:
    """What runs when a fault comes, long enough that it still does."""

    stream: PlannedRequest
    whole: PlannedRequest
    late: PlannedRequest  # its prompt is still computed
    num_late: int  # at once
    # Keeps the other pool from being idle, so that no request spills into it.
    other_pool: PlannedRequest


CPU_LOAD = Load(
    stream=PlannedRequest(0.0, 32, 1900),
    whole=PlannedRequest(0.0, 32, 300),
    late=PlannedRequest(0.0, 1900, 16),
    num_late=2,
    other_pool=PlannedRequest(0.0, 32, 15_000),
)
# For a model of the DeepSeek-V2-Lite size, whose two ranks compute some 100,000 prompt tokens in a second.
GPU_LOAD = Load(
    stream=PlannedRequest(0.0, 32, 15_000),
    whole=PlannedRequest(0.0, 32, 1500),
    late=PlannedRequest(0.0, 15_000, 16),
    num_late=4,
    other_pool=PlannedRequest(0.0, 32, 150_000),
)


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    rank: int
    strike: Callable[[PoolRanks, int], None]
    limit_s: float  # to the first answer


@dataclass(frozen=True, slots=True)
class FaultRun:
    """Seconds since the fault."""

    fault: str
    answering_s: float | None  # None: not in time
    clean_s: float | None  # until the old processes, their placement group and their GPU memory were gone
    limit_s: float
    streams: Mapping[str, int]  # how those that had begun ended: an error event, or (frozen late) done
    whole: Mapping[str, int]  # how answers in one piece ended that had tokens
    late: Mapping[str, int]  # how those without a token ended
    gpu_bytes_before: Sequence[int]  # in use on each GPU of the machine; empty without GPUs
    gpu_bytes_after: Sequence[int]  # once clean: with the replacement, without what it replaced

    @property
    def is_passed(self) -> bool:
        ended_well = all(name == "done" or name.startswith("stream_error") for name in self.streams)
        in_time = self.answering_s is not None and self.answering_s <= self.limit_s
        is_complete = set(self.late) | set(self.whole) <= {"done"}
        return in_time and self.clean_s is not None and ended_well and is_complete


class PoolRanks:
    """The processes of the pool, by rank, as the cluster's named actors tell. The pool has one replica."""

    def __init__(self) -> None:
        names = _names()
        (self.replica,) = (name for name in names if name.startswith(f"SERVE_REPLICA::{APP}#{POOL}#"))
        ranks = sorted(name for name in names if name.startswith(f"{APP}:{POOL}:"))
        self.actors = [ray.get_actor(name, "serve") for name in (self.replica, *ranks)]
        pids: list[int] = ray.get([actor.__ray_call__.remote(_pid) for actor in self.actors], timeout=60.0)
        self.processes = [psutil.Process(pid) for pid in pids]

    def is_replaced(self) -> bool:
        """Whether all of these processes are gone and another replica is complete."""
        if any(_is_alive(process) for process in self.processes):
            return False
        names = _names()
        replicas = [name for name in names if name.startswith(f"SERVE_REPLICA::{APP}#{POOL}#")]
        ranks = [name for name in names if name.startswith(f"{APP}:{POOL}:")]
        return self.replica not in replicas and len(replicas) == 1 and len(ranks) == len(self.actors) - 1


def _names() -> list[str]:
    return [actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == "serve"]


def _pid(_actor: object) -> int:
    return os.getpid()


def _is_loading(rank: Rank) -> bool:
    return rank.is_loading


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def num_groups() -> int:
    return sum(group["state"] != "REMOVED" for group in placement_group_table().values())


def _kill(ranks: PoolRanks, rank: int) -> None:
    ranks.processes[rank].send_signal(signal.SIGKILL)


def _freeze(ranks: PoolRanks, rank: int) -> None:
    ranks.processes[rank].send_signal(signal.SIGSTOP)


def _freeze_loading(ranks: PoolRanks, rank: int) -> None:
    """End this replica, and freeze a rank of the next one as soon as all of its processes are there."""
    ranks.processes[1].kill()
    deadline_s = time.perf_counter() + CLEAN_TIMEOUT_S

    def until(condition: Callable[[], bool]) -> None:
        while not condition():
            if time.perf_counter() > deadline_s:
                raise UnavailableError(f"no replica loads within {CLEAN_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)

    until(ranks.is_replaced)
    following = PoolRanks()
    until(lambda: bool(ray.get(following.actors[1].__ray_call__.remote(_is_loading), timeout=CLEAN_TIMEOUT_S)))
    following.processes[rank].send_signal(signal.SIGSTOP)
    ranks.replica, ranks.actors = following.replica, following.actors
    ranks.processes += following.processes


def _raise_in_rank(ranks: PoolRanks, rank: int) -> None:
    ray.get(ranks.actors[rank].__ray_call__.remote(raise_in_run), timeout=60.0)


def raise_in_run(_actor: object) -> None:
    """In a rank's process: an exception out of nowhere in the thread that follows rank 0."""
    for thread_id, frame in sys._current_frames().items():
        names = {caller.f_code.co_name for caller in _callers(frame)}
        if "run_rank" in names:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(MemoryError))


def _callers(frame: Any) -> Iterator[Any]:
    while frame is not None:
        yield frame
        frame = frame.f_back


FAULTS = (
    Fault("kill -9 of a rank", 1, _kill, 20.0),
    Fault("kill -STOP of a rank", 1, _freeze, 25.0),
    Fault("a rank that raises", 1, _raise_in_rank, 20.0),
    Fault("kill -9 of rank 0", 0, _kill, 20.0),
    Fault("kill -STOP of rank 0", 0, _freeze, 40.0),
)
LOADING_FAULTS = (
    Fault("kill -STOP of a rank that loads", 1, _freeze_loading, 25.0),
    Fault("kill -STOP of a rank 0 that loads", 0, _freeze_loading, 40.0),
)


async def fault_runs(
    url: str,
    address: str,
    report: Callable[[str], None],
    faults: Sequence[Fault] = FAULTS,
    load: Load = CPU_LOAD,
) -> list[FaultRun]:
    """Every fault once against the server at `url` whose cluster, on this machine, is at `address`.

    Raises UnavailableError if the cluster cannot be joined or the pool does not take requests.
    """
    join_cluster(address)
    try:
        runs = []
        async with Client(url, timeout_s=ANSWER_TIMEOUT_S) as client, _occupied_other_pool(url, load):
            for fault in faults:
                runs.append(await _run(fault, load, client))
                report(_line(runs[-1]))
        return runs
    finally:
        ray.shutdown()


@asynccontextmanager
async def _occupied_other_pool(url: str, load: Load) -> AsyncIterator[None]:
    async with Client(url, timeout_s=3600.0) as client:
        record = RequestRecord(load.other_pool)
        task = asyncio.create_task(client.send(_PROMPTS.body(load.other_pool), record, 0.0))
        try:
            await _until_streaming([record])
            await asyncio.sleep(REPORTED_S)
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _run(fault: Fault, load: Load, client: Client) -> FaultRun:
    ranks = await asyncio.to_thread(PoolRanks)
    groups = num_groups()
    async with asyncio.TaskGroup() as tasks:
        whole = [_send(tasks, client, load.whole, _WHOLE_PROMPTS) for _ in range(WHOLE)]
        await asyncio.sleep(0.2)  # they are at the replica by now, and get their tokens before the streams do
        streams = [_send(tasks, client, load.stream) for _ in range(STREAMS)]
        await _until_streaming(streams)
        gpu_bytes = await asyncio.to_thread(gpu_memory_bytes)
        late: list[RequestRecord] = []
        for _ in range(LOAD_ATTEMPTS):
            late += [_send(tasks, client, load.late) for _ in range(load.num_late)]
            if all(record.ended_s for record in whole):
                whole += [_send(tasks, client, load.whole, _WHOLE_PROMPTS) for _ in range(WHOLE)]
            await asyncio.sleep(0.2)
            waiting = [record for record in late if not record.event_times_s]
            is_loaded = bool(waiting) and not all(record.ended_s for record in whole)
            if is_loaded:
                break
        await asyncio.to_thread(fault.strike, ranks, fault.rank)
        struck_s = time.perf_counter()
        answered_s = await _first_answer(client, ranks, fault)
        clean_s = await _until_clean(ranks, groups, gpu_bytes)
        gpu_bytes_after = await asyncio.to_thread(gpu_memory_bytes)
    if not is_loaded:
        raise UnavailableError("every request was further than it should at the fault: the machine is too fast")
    # A first token that was on its way to this client when the fault came had been streamed.
    waiting = [record for record in waiting if not (record.error and record.event_times_s)]
    begun = [*streams, *(record for record in late if record not in waiting)]
    return FaultRun(
        fault=fault.name,
        answering_s=None if answered_s is None else answered_s - struck_s,
        clean_s=None if clean_s is None else clean_s - struck_s,
        limit_s=fault.limit_s,
        streams=Counter(record.error or "done" for record in begun),
        whole=Counter(record.error or _whole_end(record) for record in whole),
        late=Counter(record.error or "done" for record in waiting),
        gpu_bytes_before=gpu_bytes,
        gpu_bytes_after=gpu_bytes_after,
    )


_PROMPTS = PromptMaker(None, stream=True, seed=0)
_WHOLE_PROMPTS = PromptMaker(None, stream=False, seed=1)


def _send(
    tasks: asyncio.TaskGroup, client: Client, planned: PlannedRequest, prompts: PromptMaker = _PROMPTS
) -> RequestRecord:
    record = RequestRecord(planned)
    tasks.create_task(client.send(prompts.body(planned), record, time.perf_counter()))
    return record


def _whole_end(record: RequestRecord) -> str:
    """Tokens of an attempt that was lost are not counted."""
    expected = record.planned.output_tokens
    return "done" if record.output_tokens == expected else f"{record.output_tokens} of {expected} tokens counted"


async def _until_streaming(records: list[RequestRecord]) -> None:
    deadline_s = time.perf_counter() + START_TIMEOUT_S
    while not all(record.event_times_s for record in records):
        if failed := next((record.error for record in records if record.error), None):
            raise UnavailableError(f"a stream failed before the fault: {failed}")
        if time.perf_counter() > deadline_s:
            raise UnavailableError(f"the streams did not start in {START_TIMEOUT_S:g} s")
        await asyncio.sleep(_POLL_S)


async def _first_answer(client: Client, ranks: PoolRanks, fault: Fault) -> float | None:
    """When a request was answered that was sent after the fault had taken effect; None if none was in time."""
    deadline_s = time.perf_counter() + ANSWER_TIMEOUT_S
    is_frozen = fault.strike is _freeze  # at once: whoever answers then is another replica
    probes: dict[asyncio.Task[None], RequestRecord] = {}
    try:
        while time.perf_counter() < deadline_s:
            if is_frozen or not _is_alive(ranks.processes[fault.rank]):
                record = RequestRecord(PROBE)
                probes[asyncio.create_task(client.send(_PROMPTS.body(PROBE), record, 0.0))] = record
            await asyncio.sleep(PROBE_PERIOD_S)
            answered = [record.ended_s for task, record in probes.items() if task.done() and record.event_times_s]
            if answered:
                return min(answered)
        return None
    finally:
        for task in probes:
            task.cancel()
        await asyncio.gather(*probes, return_exceptions=True)


async def _until_clean(ranks: PoolRanks, groups: int, gpu_bytes: list[int]) -> float | None:
    """When nothing of the old replica was left, and no placement group or GPU memory in use beyond what there was."""

    def is_clean() -> bool:
        if not ranks.is_replaced() or num_groups() != groups:
            return False
        return is_freed(gpu_memory_bytes(), gpu_bytes, GPU_SLACK_BYTES)

    deadline_s = time.perf_counter() + CLEAN_TIMEOUT_S
    while time.perf_counter() < deadline_s:
        if await asyncio.to_thread(is_clean):
            return time.perf_counter()
        await asyncio.sleep(PROBE_PERIOD_S)
    return None


def _line(run: FaultRun) -> str:
    answering = "no answer" if run.answering_s is None else f"answers after {run.answering_s:.1f} s"
    clean = "NOT clean" if run.clean_s is None else f"clean after {run.clean_s:.1f} s"
    ends = f"streams {dict(run.streams)}, whole {dict(run.whole)}, late requests {dict(run.late)}"
    if run.gpu_bytes_before:
        before, after = (
            "/".join(f"{used / 2**30:.1f}" for used in sizes) for sizes in (run.gpu_bytes_before, run.gpu_bytes_after)
        )
        clean += f", GPU memory {before} GiB before, {after} after"
    return f"{run.fault}: {answering} (limit {run.limit_s:g}), {clean}; {ends}: {'ok' if run.is_passed else 'FAILED'}"
