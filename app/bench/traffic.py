"""What to send and when: length distributions, arrival times, recorded traces. Everything is drawn from one seed."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Protocol

from app.errors import ConfigError

_FORMS = "N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA, exponential:MEAN, or a mix such as 0.9*uniform:32:256,0.1*4096"


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    at_s: float  # since the start of the run
    prompt_tokens: int
    output_tokens: int


class Lengths(Protocol):
    """A distribution of token counts."""

    def draw(self, rng: random.Random) -> int: ...


@dataclass(frozen=True, slots=True)
class Uniform:
    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class LogNormal:
    median: float
    sigma: float

    def draw(self, rng: random.Random) -> int:
        return max(1, round(rng.lognormvariate(math.log(self.median), self.sigma)))


@dataclass(frozen=True, slots=True)
class Exponential:
    mean: float

    def draw(self, rng: random.Random) -> int:
        return max(1, round(rng.expovariate(1.0 / self.mean)))


@dataclass(frozen=True, slots=True)
class Mix:
    parts: tuple[Lengths, ...]
    weights: tuple[float, ...]

    def draw(self, rng: random.Random) -> int:
        return rng.choices(self.parts, self.weights)[0].draw(rng)


def parse_lengths(text: str, option: str) -> Lengths:
    """A distribution from its command-line form. Raises ConfigError that names `option`."""
    try:
        parts = [_parse_weighted(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option}: expected {_FORMS}; got {text!r}", field=option) from None
    if len(parts) == 1:
        return parts[0][1]
    return Mix(tuple(lengths for _, lengths in parts), tuple(weight for weight, _ in parts))


def _parse_weighted(text: str) -> tuple[float, Lengths]:
    weight, star, rest = text.rpartition("*")
    return (_positive(weight) if star else 1.0), _parse_simple(rest)


def _parse_simple(text: str) -> Lengths:
    match text.strip().split(":"):
        case [number]:
            return _uniform(number, number)
        case ["uniform", low, high]:
            return _uniform(low, high)
        case ["lognormal", median, sigma]:
            return LogNormal(_positive(median), _positive(sigma))
        case ["exponential", mean]:
            return Exponential(_positive(mean))
    raise ValueError(text)


def _uniform(low: str, high: str) -> Uniform:
    if not 1 <= int(low) <= int(high):
        raise ValueError(low)
    return Uniform(int(low), int(high))


def _positive(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(text)
    return value


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    """Arrival times of `rate` requests per second, memoryless."""
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def bursts(size: int, period_s: float) -> Iterator[float]:
    """`size` requests at once, every `period_s` seconds, the first at 0."""
    return (index * period_s for index in count() for _ in range(size))


def ramp(start_rate: float, end_rate: float, duration_s: float, rng: random.Random) -> Iterator[float]:
    """Poisson arrivals whose rate goes linearly from `start_rate` to `end_rate` over `duration_s`, where they end.

    Unit-rate arrivals mapped through the inverse of L(t) = start t + (end - start) t^2 / (2 duration).
    """
    slope = (end_rate - start_rate) / duration_s
    total = 0.0
    while True:
        total += rng.expovariate(1.0)
        if total >= (start_rate + end_rate) / 2 * duration_s:
            return
        root = math.sqrt(max(0.0, start_rate**2 + 2 * slope * total))
        yield 2 * total / (start_rate + root)


def plan(
    times: Iterator[float],
    prompt_tokens: Lengths,
    output_tokens: Lengths,
    rng: random.Random,
    *,
    duration_s: float | None,
    num_requests: int | None,
) -> list[PlannedRequest]:
    """Requests at `times`, up to `duration_s` or `num_requests`, whichever ends first; one of them is needed."""
    if duration_s is not None:
        times = takewhile(lambda at_s: at_s < duration_s, times)
    indices = count() if num_requests is None else range(num_requests)
    return [
        PlannedRequest(at_s, prompt_tokens.draw(rng), output_tokens.draw(rng))
        for _, at_s in zip(indices, times, strict=False)
    ]


def read_trace(path: Path) -> list[PlannedRequest]:
    """One JSON object a line: {"at_s": 0.5, "prompt_tokens": 120, "output_tokens": 64}, in any order.

    Raises ConfigError that names file, line and field.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    requests = [
        _trace_line(line, f"{path}: line {number}") for number, line in enumerate(lines, start=1) if line.strip()
    ]
    if not requests:
        raise ConfigError(f"{path}: holds no request")
    return sorted(requests, key=lambda request: request.at_s)


def _trace_line(line: str, where: str) -> PlannedRequest:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected an object")
    at_s = values.get("at_s")
    if isinstance(at_s, bool) or not isinstance(at_s, (int, float)) or not 0 <= at_s < math.inf:
        raise ConfigError(f"{where}: at_s: expected seconds since the start, got {at_s!r}", field="at_s")
    for field in ("prompt_tokens", "output_tokens"):
        value = values.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{where}: {field}: expected a positive integer, got {value!r}", field=field)
    return PlannedRequest(float(at_s), values["prompt_tokens"], values["output_tokens"])
