"""One real Ray cluster with the applications of serve_configs/local.yaml, shared by the tests of this folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 150.0
ENV = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
for _name in ("RAY_ADDRESS", "TRITON_INTERPRET"):
    ENV.pop(_name, None)


def metric(url: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples over all series that carry these labels."""
    response = httpx.get(f"{url}/metrics", timeout=10)
    response.raise_for_status()
    return sum(
        sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if sample.name == f"longspan:{name}" and labels.items() <= sample.labels.items()
    )


@dataclass(frozen=True)
class Server:
    url: str
    log_dir: Path
    dashboard_url: str
    config_file: Path  # what is deployed
    pid: int  # of `ray start`

    def deploy(self, config_file: Path) -> None:
        _run([str(Path(sys.executable).parent / "serve"), "deploy", "-a", self.dashboard_url, str(config_file)], ENV)

    def replicas(self, app: str, pool: str) -> list[psutil.Process]:
        """The processes of a pool's replicas."""
        title = f"ray::ServeReplica:{app}:{pool}"
        found = []
        for process in psutil.Process(self.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if " ".join(process.cmdline()).startswith(title):
                    found.append(process)
        return found

    def metric(self, name: str, **labels: str) -> float:
        return metric(self.url, name, **labels)


def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"did not become true within {timeout_s:g} s"
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    """Ports free now, outside the range Ray gives its workers."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]
    finally:
        for held in sockets:
            held.close()


def _run(command: list[str], env: dict[str, str]) -> None:
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    bin_dir = Path(sys.executable).parent
    # A short path: Ray puts Unix sockets, whose names are bounded, under it.
    temp_dir = Path(tempfile.mkdtemp(prefix="ls-", dir="/tmp"))
    gcs, dashboard, agent, client, http_port = _free_ports(5)
    start = [
        *(str(bin_dir / "ray"), "start", "--head", "--block", "--num-cpus=2", f"--temp-dir={temp_dir}"),
        *(f"--port={gcs}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"),
        f"--ray-client-server-port={client}",
    ]
    config = yaml.safe_load((ROOT / "serve_configs" / "local.yaml").read_text())
    config["http_options"]["port"] = http_port
    config_file = temp_dir / "local.yaml"
    config_file.write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{http_port}"
    with (temp_dir / "head.log").open("w") as log:
        head = subprocess.Popen(start, cwd=ROOT, env=ENV, stdout=log, stderr=log, start_new_session=True)
    try:
        log_dir = temp_dir / "session_latest" / "logs"
        running = Server(url, log_dir, f"http://127.0.0.1:{dashboard}", config_file, head.pid)
        _wait_until_up(f"{running.dashboard_url}/api/version", head, temp_dir)
        running.deploy(config_file)
        _wait_until_up(f"{url}/ready", head, temp_dir)
        yield running
    finally:
        _stop(head, temp_dir)
        shutil.rmtree(temp_dir, ignore_errors=True)


def _wait_until_up(url: str, head: subprocess.Popen[bytes], temp_dir: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert head.poll() is None, (temp_dir / "head.log").read_text()
        with suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    pytest.fail(f"{url} did not answer within {START_TIMEOUT_S:.0f} s")


def _stop(head: subprocess.Popen[bytes], temp_dir: Path) -> None:
    """End every process of this cluster and no other."""
    family = _cluster_processes(head, temp_dir)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(family, timeout=5)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    head.kill()
    head.wait(10)
    psutil.wait_procs(alive, timeout=5)


def _cluster_processes(head: subprocess.Popen[bytes], temp_dir: Path) -> list[psutil.Process]:
    found: set[psutil.Process] = set()
    with suppress(psutil.NoSuchProcess):
        found.update(psutil.Process(head.pid).children(recursive=True))
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if str(temp_dir) in " ".join(process.cmdline()):
                found.update((process, *process.children(recursive=True)))
    return list(found)
