"""`longspan bench scenario` as a command."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from tests.cluster.conftest import eventually


@pytest.mark.full
def test_a_terminated_one_leaves_no_server_behind() -> None:
    arguments = [sys.executable, "-m", "app.cli", "bench", "scenario", "cold-start"]
    command = psutil.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    eventually(lambda: any(process.name() == "raylet" for process in command.children(recursive=True)))
    started = command.children(recursive=True)
    command.send_signal(signal.SIGTERM)
    assert command.wait(60.0) == 143
    _, left = psutil.wait_procs(started, timeout=10.0)
    assert not left
