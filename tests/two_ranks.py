"""Two ranks as processes of their own, for what needs a GPU each."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable

import pytest
import torch

from app.model.parallel import RankPlace

NEEDS_TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="ranks need a GPU each")


def run_two_ranks(
    target: Callable[..., None], *args: object, tensor: int = 2, expert: int = 1, timeout_s: float
) -> None:
    """target(place, *args) in each; both must end well in time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        method = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    places = [RankPlace(rank, tensor, expert, method) for rank in range(2)]
    ranks = [context.Process(target=target, args=(place, *args)) for place in places]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(timeout_s)
            assert rank.exitcode == 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
