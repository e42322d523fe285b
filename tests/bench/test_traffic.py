"""Length distributions, arrival times and traces."""

from __future__ import annotations

import random
from itertools import islice, pairwise
from pathlib import Path
from statistics import mean, median

import pytest

from app.bench import traffic
from app.bench.traffic import PlannedRequest, parse_lengths
from app.errors import ConfigError

DRAWS = 4000
# The relative error of a mean of 4,000 draws stays far below this for the distributions used here.
TOLERANCE = 0.1


def draws(text: str) -> list[int]:
    lengths, rng = parse_lengths(text, "--prompt-tokens"), random.Random(1)
    return [lengths.draw(rng) for _ in range(DRAWS)]


def test_fixed_length() -> None:
    assert set(draws("128")) == {128}


def test_uniform_reaches_both_ends() -> None:
    values = draws("uniform:3:6")
    assert set(values) == {3, 4, 5, 6}


def test_lognormal_has_its_median() -> None:
    assert median(draws("lognormal:200:0.5")) == pytest.approx(200, rel=TOLERANCE)


def test_exponential_has_its_mean_and_is_positive() -> None:
    values = draws("exponential:50")
    assert mean(values) == pytest.approx(50, rel=TOLERANCE)
    assert min(values) >= 1


def test_mix_follows_its_weights() -> None:
    values = draws("0.9*uniform:10:20,0.1*4096")
    assert values.count(4096) / DRAWS == pytest.approx(0.1, abs=0.02)
    assert max(value for value in values if value != 4096) <= 20


@pytest.mark.parametrize(
    "text",
    ["", "0", "-5", "1.5", "uniform:9:3", "uniform:0:3", "lognormal:0:1", "exponential:nan", "x*3", "0*3", "a:b:c"],
)
def test_wrong_lengths_name_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--output-tokens: ") as caught:
        parse_lengths(text, "--output-tokens")
    assert caught.value.field == "--output-tokens"


def test_poisson_has_its_rate() -> None:
    times = list(islice(traffic.poisson(20.0, random.Random(2)), DRAWS))
    assert times == sorted(times)
    assert DRAWS / times[-1] == pytest.approx(20.0, rel=TOLERANCE)


def test_bursts() -> None:
    assert list(islice(traffic.bursts(3, 2.0), 7)) == [0, 0, 0, 2, 2, 2, 4]


@pytest.mark.parametrize(("start", "end"), [(2.0, 30.0), (30.0, 2.0), (10.0, 10.0)])
def test_ramp_changes_its_rate(start: float, end: float) -> None:
    times = list(traffic.ramp(start, end, 200.0, random.Random(3)))
    assert all(earlier <= later for earlier, later in pairwise(times))
    assert times[-1] <= 200.0
    # The expected count of each half is the integral of the rate over it.
    middle = (start + end) / 2
    first = sum(at_s < 100.0 for at_s in times)
    assert first == pytest.approx(100 * (start + middle) / 2, rel=TOLERANCE)
    assert len(times) - first == pytest.approx(100 * (middle + end) / 2, rel=TOLERANCE)


def planned(duration_s: float | None, num_requests: int | None) -> list[PlannedRequest]:
    fixed = parse_lengths("5", "--prompt-tokens")
    return traffic.plan(
        traffic.bursts(1, 1.0), fixed, fixed, random.Random(0), duration_s=duration_s, num_requests=num_requests
    )


def test_plan_ends_with_the_first_limit() -> None:
    assert len(planned(4.5, None)) == 5
    assert len(planned(None, 3)) == 3
    assert len(planned(4.5, 3)) == 3
    assert len(planned(2.0, 30)) == 2


def test_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"at_s": 2, "prompt_tokens": 10, "output_tokens": 3}\n\n'
        '{"at_s": 0.5, "prompt_tokens": 7, "output_tokens": 1}\n'
    )
    assert traffic.read_trace(path) == [PlannedRequest(0.5, 7, 1), PlannedRequest(2.0, 10, 3)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not valid JSON"),
        ("[1]", "line 2: expected an object"),
        ('{"at_s": -1, "prompt_tokens": 1, "output_tokens": 1}', "line 2: at_s"),
        ('{"at_s": NaN, "prompt_tokens": 1, "output_tokens": 1}', "line 2: at_s"),
        ('{"at_s": 1, "prompt_tokens": 0, "output_tokens": 1}', "line 2: prompt_tokens"),
        ('{"at_s": 1, "prompt_tokens": 1, "output_tokens": true}', "line 2: output_tokens"),
        ('{"at_s": 1, "prompt_tokens": 1}', "line 2: output_tokens"),
    ],
)
def test_wrong_trace_names_file_line_and_field(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n' + line + "\n")
    with pytest.raises(ConfigError) as caught:
        traffic.read_trace(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_absent_or_empty_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        traffic.read_trace(tmp_path / "absent.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="holds no request"):
        traffic.read_trace(tmp_path / "empty.jsonl")
