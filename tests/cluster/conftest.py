"""One real Ray cluster with the applications of serve_configs/local.yaml, shared by the tests of this folder."""

from __future__ import annotations

import math
import os
import random
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
START_TIMEOUT_S = 200.0
ANSWER_TIMEOUT_S = 120.0  # of any request: a busy machine is not what these tests look for
REPORT_WAY_S = 3.0  # from a replica to the monitor and on to /metrics, in any case
# Ray's workers take 10002-19999, LocalServer 23000-23999, ranks 24000-31999; Linux gives away what lies above.
_PORTS = range(20000, 23000)
ENV = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
for _name in ("RAY_ADDRESS", "TRITON_INTERPRET"):
    ENV.pop(_name, None)


class Scrape:
    """What /metrics shows at one moment."""

    def __init__(self, url: str) -> None:
        response = httpx.get(f"{url}/metrics", timeout=ANSWER_TIMEOUT_S)
        response.raise_for_status()
        self._samples = [
            sample for family in text_string_to_metric_families(response.text) for sample in family.samples
        ]

    def values(self, name: str, **labels: str) -> dict[str, float]:
        """A metric by replica, over all series that carry these labels."""
        found: dict[str, float] = {}
        for sample in self._samples:
            if sample.name == f"longspan:{name}" and labels.items() <= sample.labels.items():
                replica = sample.labels.get("replica", "")
                found[replica] = found.get(replica, 0.0) + sample.value
        return found

    def total(self, name: str, **labels: str) -> float:
        return sum(self.values(name, **labels).values())

    @property
    def is_idle(self) -> bool:
        return self.total("num_requests_running") + self.total("num_requests_waiting") == 0


def metric(url: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples over all series that carry these labels."""
    return Scrape(url).total(name, **labels)


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


def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"did not become true within {timeout_s:g} s"
        time.sleep(0.1)


def settle(url: str) -> Scrape:
    """Wait until both pools are idle by reports made after this call, and counters stand still; what they show then."""
    since_s = time.monotonic()
    seen: list[Scrape] = []

    def is_settled() -> bool:
        seen[:] = [Scrape(url)]
        ages = [seen[0].values("snapshot_age_seconds", pool=pool) for pool in ("short", "long")]
        oldest_s = max(max(pool.values(), default=math.inf) for pool in ages)
        return seen[0].is_idle and time.monotonic() - oldest_s > since_s + REPORT_WAY_S

    eventually(is_settled)
    return seen[0]


def _free_ports(count: int) -> list[int]:
    """Ports free now that nothing but a test asks for."""
    free: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            free.append(port)
        if len(free) == count:
            return free
    raise RuntimeError(f"no {count} free ports in {_PORTS.start}-{_PORTS.stop - 1}")


def _run(command: list[str], env: dict[str, str]) -> None:
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=180, check=False)
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
    pytest.fail(f"{url} did not answer within {START_TIMEOUT_S:.0f} s: {_logged_errors(temp_dir)}")


def _logged_errors(temp_dir: Path) -> str:
    logs = [temp_dir / "head.log", *temp_dir.glob("session_latest/logs/serve/*.log")]
    lines = [line for path in logs for line in path.read_text(errors="replace").splitlines() if "Error" in line]
    return " | ".join(lines[-5:]) or "no error was logged"


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
    head.wait(60)
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
