"""Synthetic and recorded traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import ConfigError
from app.planning.trace import (
    LengthClass,
    TraceRequest,
    bursts,
    constant,
    diurnal,
    merge,
    poisson,
    read_jsonl,
    step,
)

EQUAL = LengthClass(weight=1.0, prompt_tokens=100, output_tokens=10, spread=0.0)


def count(trace: list[TraceRequest], start: float, end: float) -> int:
    return sum(start <= one.arrival_s < end for one in trace)


def test_a_constant_rate() -> None:
    trace = poisson(constant(5.0), 1000.0, [EQUAL], seed=1)
    assert len(trace) == pytest.approx(5000, rel=0.05)
    assert trace == sorted(trace, key=lambda one: one.arrival_s)
    assert {one.num_prompt_tokens for one in trace} == {100}
    assert poisson(constant(5.0), 1000.0, [EQUAL], seed=1) == trace
    assert poisson(constant(5.0), 1000.0, [EQUAL], seed=2) != trace


def test_rates_that_vary() -> None:
    stepped = poisson(step(1.0, 9.0, at_s=500), 1000.0, [EQUAL], seed=1)
    assert count(stepped, 0, 500) == pytest.approx(500, rel=0.15)
    assert count(stepped, 500, 1000) == pytest.approx(4500, rel=0.05)
    burst = poisson(bursts(0.0, 10.0, period_s=100, share=0.3, offset_s=20), 1000.0, [EQUAL], seed=1)
    assert all((one.arrival_s - 20) % 100 < 30 for one in burst)
    assert len(burst) == pytest.approx(3000, rel=0.1)
    daily = poisson(diurnal(5.0, 0.8, period_s=1000), 1000.0, [EQUAL], seed=1)
    assert count(daily, 0, 500) > 2 * count(daily, 500, 1000)


def test_a_mix_of_lengths() -> None:
    long = LengthClass(weight=3.0, prompt_tokens=5000, output_tokens=50, spread=0.4)
    trace = poisson(constant(5.0), 1000.0, [EQUAL, long], seed=1)
    longs = sorted(one.num_prompt_tokens for one in trace if one.num_prompt_tokens != 100)
    assert len(longs) / len(trace) == pytest.approx(0.75, abs=0.03)
    assert longs[len(longs) // 2] == pytest.approx(5000, rel=0.05)
    assert longs[-1] <= 20_000


def test_a_recorded_trace_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"at_s": 1.5, "prompt_tokens": 20, "output_tokens": 4}\n\n'
        '{"at_s": 0.5, "prompt_tokens": 10, "output_tokens": 3, "max_tokens": 8, "session": "s"}\n'
    )
    first, second = TraceRequest(0.5, 10, 3, max_tokens=8, session="s"), TraceRequest(1.5, 20, 4)
    assert read_jsonl(path) == [first, second] == merge([second], [first])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 2: "),
        ("[1]", "line 2: expected an object"),
        ('{"at_s": 1, "prompt_tokens": 5}', "line 2: output_tokens"),
        ('{"at_s": 1, "prompt_tokens": 5, "output_tokens": 0}', "line 2: output_tokens"),
        ('{"at_s": 1, "prompt_tokens": true, "output_tokens": 1}', "line 2: prompt_tokens"),
        ('{"at_s": 1, "prompt_tokens": 5, "output_tokens": 1, "max_tokens": 0}', "line 2: max_tokens"),
        ('{"at_s": 1, "prompt_tokens": 5, "output_tokens": 1, "session": 7}', "line 2: session"),
        ('{"at_s": NaN, "prompt_tokens": 5, "output_tokens": 1}', "line 2: at_s"),
        ('{"at_s": 1, "prompt_tokens": 5, "output_tokens": 1, "colour": 1}', "line 2: expected"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message):
        read_jsonl(path)


def test_a_trace_without_requests_or_without_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, message in (("empty.jsonl", "holds no request"), ("missing.jsonl", "cannot be read")):
        with pytest.raises(ConfigError, match=message):
            read_jsonl(tmp_path / name)
