"""The README's commands that need a server, run as they stand, on the cluster of these tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT, Server
from tests.test_readme import blocks, commands

pytestmark = pytest.mark.timeout(400)  # the first test also starts the cluster

URL = "http://127.0.0.1:8000"


def test_curl_streams_an_answer(server: Server) -> None:
    (command,) = (command for command in commands() if command.startswith("curl "))
    assert URL in command
    done = subprocess.run(
        ["bash", "-c", command.replace(URL, server.url)], capture_output=True, text=True, timeout=200, check=True
    )
    events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert len(choices) > 1  # how many tokens come together depends on the machine
    assert "".join(choice["delta"].get("content") or "" for choice in choices).strip()
    assert choices[-1]["finish_reason"] in ("stop", "length")


def test_python_client_streams_an_answer(server: Server) -> None:
    (program,) = blocks("python")
    assert URL in program
    command = [sys.executable, "-c", program.replace(URL, server.url)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.strip()


def test_bench_measures_the_server(server: Server, tmp_path: Path) -> None:
    (command,) = (command.split() for command in commands() if "longspan bench" in command)
    arguments = [*command[1:], "--url", server.url, "--json", str(tmp_path / "result.json")]
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
