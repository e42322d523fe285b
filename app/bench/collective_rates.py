"""Small collectives of ranks, a GPU each: through shared memory beside NCCL, in microseconds of a graph's calls."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
from collections.abc import Callable
from multiprocessing.queues import Queue
from pathlib import Path

import torch

from app.model.parallel import Group, RankPlace, Ranks

ROWS = (1, 8, 32, 128, 256, 512, 1024)
WIDTH = 2048  # bf16 values of a row
NUM_CALLS, NUM_REPLAYS = 50, 15
TIMEOUT_S = 180.0

Times = dict[str, dict[int, float]]  # collective -> rows of each rank -> us


def measure(ranks: Ranks, device: torch.device) -> Times:
    """Medians of this rank; `nccl` is the same group without its mailbox."""
    shared, nccl = ranks.tensor, Group(ranks.tensor.handle)
    times: Times = {}
    for rows in ROWS:
        x = torch.zeros(rows * ranks.tensor.size, WIDTH, dtype=torch.bfloat16, device=device)
        part = x[:rows]
        for name, group in (("shared", shared), ("nccl", nccl)):
            for kind, call in _calls(group, x, part).items():
                times.setdefault(f"{kind}, {name}", {})[rows] = _timed(call, ranks.host)
    return times


def _calls(group: Group, x: torch.Tensor, part: torch.Tensor) -> dict[str, Callable[[], object]]:
    return {
        "all_reduce": lambda: group.all_reduce(part),
        "all_gather": lambda: group.all_gather(part),
        "all_to_all": lambda: group.start_all_to_all(x, None, None).wait(),
    }


def _timed(call: Callable[[], object], host: Group) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(NUM_CALLS):
            call()
    times: list[float] = []
    for _ in range(NUM_REPLAYS):
        torch.cuda.synchronize()
        host.smallest(0)  # all begin together
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / NUM_CALLS)
    return statistics.median(times)


def _run(place: RankPlace, answers: Queue[Times]) -> None:
    device = torch.device("cuda", place.rank)
    torch.cuda.set_device(device)
    ranks = Ranks.join(place, device)
    times = measure(ranks, device)
    ranks.host.smallest(0)  # nobody leaves while another one waits
    if place.rank == 0:
        answers.put(times)
        answers.close()
        answers.join_thread()
    os._exit(0)  # communicators that graphs use cannot be closed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        method = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    answers: Queue[Times] = context.Queue()
    places = [RankPlace(rank, options.gpus, 1, method) for rank in range(options.gpus)]
    processes = [context.Process(target=_run, args=(place, answers)) for place in places]
    for process in processes:
        process.start()
    try:
        times = answers.get(timeout=TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
    for name, of_rows in times.items():
        print(f"{name:>20}: " + ", ".join(f"{rows} rows {us:.1f} us" for rows, us in of_rows.items()))
    options.json.write_text(json.dumps(times, indent=1))


if __name__ == "__main__":
    main()
