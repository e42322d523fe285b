"""A start measured from outside: two processes, their parts adding up."""

from __future__ import annotations

import subprocess
import time

import pytest

from app.bench.engine_start import start_times
from app.config import EMBEDDED_MODEL


@pytest.mark.full
def test_parts_of_a_start_add_up() -> None:
    lines: list[str] = []
    began = time.time()
    times = start_times(str(EMBEDDED_MODEL), lines.append)
    elapsed = time.time() - began
    assert list(times) == ["cold", "kernel cache"] and len(lines) == 2
    whole = 0.0
    for parts in times.values():
        assert min(parts.values()) >= 0
        total = parts["total_s"]
        assert total == pytest.approx(sum(parts.values()) - total - parts["weights_s"])
        assert total > parts["imports_s"] > 0.1
        whole += total + parts["weights_s"]
    assert whole <= elapsed


def test_a_start_that_fails_is_an_error() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        start_times("no-such-shape", lambda line: None)
