"""Replicas of several ranks on real Ray: they answer, and whatever loses a rank replaces all of them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from app.bench.server import LocalServer
from app.bench.shard_faults import FAULTS, LOADING_FAULTS, fault_runs
from tests.cluster.conftest import ANSWER_TIMEOUT_S, ROOT, START_TIMEOUT_S, Server, eventually, metric

pytestmark = pytest.mark.timeout(600)  # the first test also starts two clusters

# `longspan bench scenario shard-faults` holds the seconds to the first answer; a busy machine starts slowly.
PATIENT_FAULTS = [replace(fault, limit_s=ANSWER_TIMEOUT_S) for fault in FAULTS]


@pytest.fixture(scope="module")
def sharded() -> Iterator[LocalServer]:
    with LocalServer(ROOT / "serve_configs" / "local-sharded.yaml", start_timeout_s=START_TIMEOUT_S) as server:
        yield server


def answer(url: str, prompt: str, max_tokens: int) -> str:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=ANSWER_TIMEOUT_S)
    response.raise_for_status()
    text: str = response.json()["choices"][0]["text"]
    return text


@pytest.mark.parametrize(("repeats", "max_tokens"), [(1, 32), (300, 8)], ids=["short-tensor", "long-expert"])
def test_two_ranks_answer_as_one(sharded: LocalServer, server: Server, repeats: int, max_tokens: int) -> None:
    prompt = "Once upon a time there was a bear who " * repeats
    assert answer(sharded.url, prompt, max_tokens) == answer(server.url, prompt, max_tokens)
    pool = "short" if repeats == 1 else "long"
    eventually(lambda: metric(sharded.url, "expert_tokens_total", pool=pool) > 0)


def test_a_killed_rank_is_replaced_with_its_replica(sharded: LocalServer) -> None:
    lines: list[str] = []
    (run,) = asyncio.run(fault_runs(sharded.url, sharded.ray_address, lines.append, PATIENT_FAULTS[:1]))
    assert run.is_passed, lines


@pytest.mark.full
def test_every_fault_replaces_the_replica(sharded: LocalServer) -> None:
    lines: list[str] = []
    runs = asyncio.run(fault_runs(sharded.url, sharded.ray_address, lines.append, PATIENT_FAULTS))
    assert len(runs) == 5 and all(run.is_passed for run in runs), lines


@pytest.mark.full
def test_a_rank_frozen_while_it_loads_is_replaced(sharded: LocalServer) -> None:
    lines: list[str] = []
    faults = [replace(fault, limit_s=ANSWER_TIMEOUT_S) for fault in LOADING_FAULTS]
    runs = asyncio.run(fault_runs(sharded.url, sharded.ray_address, lines.append, faults))
    assert len(runs) == 2 and all(run.is_passed for run in runs), lines


@pytest.mark.full
def test_replicas_that_lose_opposite_nodes_do_not_block_each_other() -> None:
    command = [sys.executable, "-m", "tests.cluster.node_loss"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_check_asks_the_cluster_for_room(sharded: LocalServer) -> None:
    command = ["check", str(ROOT / "serve_configs" / "local-sharded.yaml"), "--cluster", sharded.ray_address]
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", *command], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("the cluster has room for all 3 replicas\n")
