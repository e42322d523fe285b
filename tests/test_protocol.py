"""SamplingParams refuses what no model can do, naming the field; the types that travel survive the journey."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import pytest

from app.errors import InvalidRequestError
from app.protocol import EngineStats, GenerateRequest, Histogram, SamplingParams, TokenChunk, TokenLogprob

BAD_VALUES: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("min_tokens", -1),
    ("min_tokens", 17),  # above max_tokens
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 100.5),
    ("top_k", 0),
    ("top_k", -1),
    ("top_p", -0.1),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("min_p", 1.5),
    ("min_p", -0.5),
    ("presence_penalty", 2.5),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.inf),
    ("logit_bias", {5: 101.0}),
    ("logit_bias", {5: math.nan}),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("stop", ("a", "")),
    ("stop", ("a", "b" * 1025)),
    ("logprobs", -1),
    ("logprobs", 21),
    ("max_tokens", True),
]


@pytest.mark.parametrize(("field", "value"), BAD_VALUES, ids=lambda value: str(value)[:20])
def test_a_bad_value_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert str(caught.value).startswith(f"{field}: ")


def test_every_bounded_field_has_a_bad_value() -> None:
    unbounded = {"stop_token_ids", "ignore_eos"}
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {field for field, _ in BAD_VALUES} == fields - unbounded


@pytest.mark.parametrize(
    "values",
    [
        {"min_tokens": 16},
        {"temperature": 0.0, "top_p": 0.0, "min_p": 1.0, "top_k": 1},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 0.01},
        {"logit_bias": {0: -100.0, 7: 100.0}, "seed": -(2**63), "logprobs": 20, "stop": ("b" * 1024,)},
    ],
)
def test_the_limits_themselves_are_allowed(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values
    assert params.is_greedy == (params.temperature == 0.0)


def test_logit_bias_is_a_copy() -> None:
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[3] = math.nan
    assert params.logit_bias == {3: 1.0}


@pytest.mark.parametrize(
    "value",
    [
        GenerateRequest("r", (1, 2, 3), SamplingParams(stop=("x",), logit_bias={1: 2.0}), timeout_s=3.0),
        TokenChunk("r", (4,), (TokenLogprob(4, -0.5, ((4, -0.5), (5, -1.5))),), "stop", "x", 3, 0, 1, "text"),
        EngineStats(num_blocks=4, num_free_blocks=1, step_time_seconds=Histogram((0.1,), (1, 0), 0.05)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_pickles(value: Any) -> None:
    assert pickle.loads(pickle.dumps(value)) == value


def test_kv_cache_usage() -> None:
    assert EngineStats(num_blocks=4, num_free_blocks=1).kv_cache_usage_perc == 0.75
    assert EngineStats().kv_cache_usage_perc == 0.0
