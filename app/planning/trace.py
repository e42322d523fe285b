"""Requests over time: recorded as JSON lines, or drawn from a rate and a mix of lengths."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrival_s: float  # since the trace's start
    num_prompt_tokens: int
    num_output_tokens: int  # how many it really generates; a router cannot know
    max_tokens: int | None = None  # what the client asked for
    session: str | None = None  # turns of one conversation share it


@dataclass(frozen=True, slots=True)
class LengthClass:
    """Prompts and outputs of one kind: lognormal around a median, cut at four times of it."""

    weight: float
    prompt_tokens: int  # median
    output_tokens: int  # median
    spread: float = 0.5  # standard deviation of the logarithm; 0: all equal


SHORT = LengthClass(weight=1.0, prompt_tokens=400, output_tokens=120)
LONG = LengthClass(weight=1.0, prompt_tokens=24_000, output_tokens=300)


def constant(rate: float) -> Callable[[float], float]:
    return lambda now: rate


def step(before: float, after: float, at_s: float) -> Callable[[float], float]:
    return lambda now: before if now < at_s else after


def bursts(
    low: float, high: float, period_s: float, share: float = 0.5, offset_s: float = 0.0
) -> Callable[[float], float]:
    """`high` for the first `share` of every period, shifted by `offset_s`; `low` for the rest."""
    return lambda now: high if (now - offset_s) % period_s < share * period_s else low


def diurnal(mean: float, swing: float, period_s: float = 86_400.0) -> Callable[[float], float]:
    """A sine around `mean`; `swing` from 0 to 1 is its share of the mean."""
    return lambda now: mean * (1.0 + swing * math.sin(2 * math.pi * now / period_s))


def poisson(
    rate: Callable[[float], float], duration_s: float, mix: Sequence[LengthClass], seed: int, peak: float | None = None
) -> list[TraceRequest]:
    """A Poisson process of varying rate (requests a second), by thinning; the same seed gives the same trace.

    `peak` bounds the rate; without it the rate is probed once a second.
    """
    draw = random.Random(seed)
    most = max(rate(float(second)) for second in range(math.ceil(duration_s) + 1)) if peak is None else peak
    requests: list[TraceRequest] = []
    now = 0.0
    while most > 0 and (now := now + draw.expovariate(most)) < duration_s:
        if draw.random() * most < rate(now):
            kind = draw.choices(mix, [one.weight for one in mix])[0]
            requests.append(
                TraceRequest(now, _length(draw, kind.prompt_tokens, kind), _length(draw, kind.output_tokens, kind))
            )
    return requests


def _length(draw: random.Random, median: int, kind: LengthClass) -> int:
    return max(1, min(4 * median, round(median * math.exp(draw.gauss(0.0, kind.spread)))))


def merge(*traces: Iterable[TraceRequest]) -> list[TraceRequest]:
    return sorted((request for trace in traces for request in trace), key=lambda request: request.arrival_s)


# Of a line: what `longspan bench --trace` reads, and what only a simulation can use.
_FIELDS = {
    "at_s": "arrival_s",
    "prompt_tokens": "num_prompt_tokens",
    "output_tokens": "num_output_tokens",
    "max_tokens": "max_tokens",
    "session": "session",
}


def read_jsonl(path: Path) -> list[TraceRequest]:
    """Requests in order of arrival, a JSON object a line: {"at_s": 0.5, "prompt_tokens": 120, "output_tokens": 64}.

    Raises ConfigError that names the file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    requests = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                requests.append(_parse(json.loads(line)))
            except ValueError as error:
                raise ConfigError(f"{path}: line {number}: {error}") from None
    if not requests:
        raise ConfigError(f"{path}: holds no request")
    return merge(requests)


def _parse(values: object) -> TraceRequest:
    if not isinstance(values, dict) or not set(values) <= set(_FIELDS):
        raise ValueError(f"expected an object with the fields {', '.join(_FIELDS)}")
    at_s = values.get("at_s")
    if isinstance(at_s, bool) or not isinstance(at_s, int | float) or not 0 <= at_s < math.inf:
        raise ValueError(f"at_s: expected seconds since the start, got {at_s!r}")
    for name in ("prompt_tokens", "output_tokens", *({"max_tokens"} & set(values))):
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected a positive integer, got {value!r}")
    if not isinstance(values.get("session", ""), str):
        raise ValueError(f"session: expected a string, got {values['session']!r}")
    return TraceRequest(**{_FIELDS[name]: value for name, value in values.items()})
