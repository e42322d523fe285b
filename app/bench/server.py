"""A real server for measurements: `serve run` of a config file on its own ports and temporary folder."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import yaml

from app.config import PoolsConfig, load_config
from app.errors import ConfigError, PreflightError

LOCAL_CONFIG = Path("serve_configs/local.yaml")
POOLS_APPLICATION = "pools"
STOP_TIMEOUT_S = 30.0
_POLL_S = 0.05
# Ray's workers take 10002-19999; Linux hands out ports above 32767 by itself.
_PORTS = range(23000, 24000)
_ADDRESS_OPTION = "--gcs-address="  # every process of Ray's own has it
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class LocalServer:
    """Starts on entering, stops every process it started on leaving. A context manager.

    Attributes:
        url:         http://127.0.0.1:PORT
        log_path:    what `serve run` wrote; kept if the start fails
    """

    def __init__(
        self,
        config: Path = LOCAL_CONFIG,
        *,
        args: Mapping[str, Mapping[str, Any]] | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        """`args` replaces top-level fields of an application's args, by application name."""
        self._config, self._args, self._start_timeout_s = config, args or {}, start_timeout_s
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        # Ray puts sockets in here, whose paths are limited to 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="ls-", dir="/tmp"))
        self.log_path = self._folder / "serve.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: dict[int, psutil.Process] = {}

    def __enter__(self) -> LocalServer:
        try:
            self.launch()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def launch(self) -> None:
        """Start the process and return at once. Raises ConfigError if the config file cannot be read."""
        path = self._folder / "config.yaml"
        path.write_text(yaml.safe_dump(self._edited_config()))
        settings = {
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": str(self._folder),
            "RAY_ADDRESS": "local",  # never join a cluster that happens to run
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        command = ["env", *(f"{name}={value}" for name, value in settings.items())]
        command += [sys.executable, "-m", "ray.serve.scripts", "run", str(path)]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def wait_ready(self) -> None:
        """Wait for /ready. Raises PreflightError with the end of the log if the server ends or takes too long."""
        deadline_s = time.monotonic() + self._start_timeout_s
        with httpx.Client(timeout=2.0) as client:
            while time.monotonic() < deadline_s:
                self.check_alive()
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"{self.url}/ready").status_code == 200:
                        return
                time.sleep(_POLL_S)
        raise PreflightError(f"the server was not ready after {self._start_timeout_s:g} s: {self._log_tail()}")

    def check_alive(self) -> None:
        """Raises PreflightError with the end of the log if `serve run` has ended."""
        if self._process is None or self._process.poll() is not None:
            raise PreflightError(f"the server ended: {self._log_tail()}")

    @property
    def ray_address(self) -> str:
        """For ray.init: HOST:PORT of the cluster's control service."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                arguments: list[str] = process.cmdline()
                for argument in arguments:
                    if argument.startswith(_ADDRESS_OPTION):
                        return argument.removeprefix(_ADDRESS_OPTION)
        raise PreflightError("the cluster's control service was not found")

    def processes(self) -> list[psutil.Process]:
        """Every live process of the cluster, `serve run` itself first."""
        if self._process is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            for process in (root, *root.children(recursive=True)):
                self._seen.setdefault(process.pid, process)
        return [process for process in self._seen.values() if process.is_running()]

    def replica_processes(self, pool: str, application: str = "pools") -> list[psutil.Process]:
        """The processes of a pool's replicas that live now."""
        title = f"ray::ServeReplica:{application}:{pool}"
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if " ".join(process.cmdline()).startswith(title):
                    found.append(process)
        return found

    def wait_replicas(self, pool: str, count: int) -> None:
        """Wait until /metrics shows so many replicas of a pool, and no others. Raises PreflightError after a while."""
        deadline_s = time.monotonic() + self._start_timeout_s
        marker = f'pool="{pool}",replica='
        while time.monotonic() < deadline_s:
            text = httpx.get(f"{self.url}/metrics", timeout=10.0).text
            shown = [line for line in text.splitlines() if line.startswith("longspan:num_blocks{") and marker in line]
            if len(shown) == count == len(self.replica_processes(pool)):
                return
            time.sleep(10 * _POLL_S)
        raise PreflightError(f"the {pool} pool has no {count} replicas after {self._start_timeout_s:g} s")

    def unique_memory_bytes(self) -> int:
        """Memory no other process shares (USS), summed over the cluster's processes."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().uss
        return total

    def stop(self) -> None:
        """Shut Serve and Ray down, then end whatever of them is left, and remove the folder.

        Who is interrupted once more meanwhile wants it to end now.
        """
        try:
            if self._process is not None and self._process.poll() is None:
                self.processes()
                self._process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_TIMEOUT_S)
            psutil.wait_procs(self.processes(), timeout=5.0)
        finally:
            for process in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if self._process is not None:
                self._process.wait()
                self._process = None
            shutil.rmtree(self._folder, ignore_errors=True)

    def _edited_config(self) -> dict[str, Any]:
        try:
            document: dict[str, Any] = yaml.safe_load(self._config.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{self._config}: cannot be read ({error.strerror})") from None
        document["http_options"] = {**document.get("http_options", {}), "host": "127.0.0.1", "port": self.port}
        for application in document["applications"]:
            application["args"] = {**application.get("args", {}), **self._args.get(application["name"], {})}
        return document

    def _log_tail(self) -> str:
        """The last lines of the log that tell of an error, else its last lines, as one line."""
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        lines = [line.strip() for line in _COLOUR.sub("", text).splitlines() if line.strip()]
        lines = [line for line in lines if "Error" in line] or lines
        return " | ".join(lines[-3:]) or "no output"


def pools_config(path: Path) -> PoolsConfig:
    """The args of the file's application of pools. Raises ConfigError."""
    for application in yaml.safe_load(path.read_text(encoding="utf-8"))["applications"]:
        if application["name"] == POOLS_APPLICATION:
            return load_config(PoolsConfig, application.get("args") or {}, where="args")
    raise ConfigError(f"{path}: has no application {POOLS_APPLICATION!r}")


def _free_port() -> int:
    for port in _free_candidates():
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise PreflightError(f"no free port in {_PORTS.start}-{_PORTS.stop - 1}")


def _free_candidates() -> Iterator[int]:
    # Neighbouring processes look from different starts.
    offset = os.getpid() * 7 % len(_PORTS)
    return (_PORTS[(offset + index) % len(_PORTS)] for index in range(len(_PORTS)))
