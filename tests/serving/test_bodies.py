"""Every wrong value of a body is refused, and the refusal names the field."""

from __future__ import annotations

from typing import Any

import pytest

from app.errors import InvalidRequestError, RequestError
from app.serving.bodies import UNSUPPORTED_FIELDS
from app.serving.openai import parse_chat, parse_completion

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [USER], **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "hi", **fields}


BAD_SAMPLING = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "5"),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", 2**70),
    ("min_tokens", -1),
    ("min_tokens", 100),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", -0.1),
    ("temperature", "warm"),
    ("temperature", True),
    ("temperature", 10**400),
    ("top_k", -2),
    ("top_p", 1.1),
    ("top_p", float("nan")),
    ("min_p", -0.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", float("nan")),
    ("repetition_penalty", 0),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", [1]),
    ("logit_bias", {"1": float("nan")}),
    ("seed", 2**63),
    ("seed", "s"),
    ("stop", [""]),
    ("stop", [1]),
    ("stop", ["\ud800"]),
    ("stop", ["x"] * 17),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", 5),
    ("ignore_eos", "yes"),
    ("n", 0),
    ("n", 129),
    ("n", 1.0),
    ("stream", "true"),
    ("stream_options", {"include_usage": True}),
    ("priority", 2**40),
    ("timeout_s", 0),
    ("timeout_s", float("inf")),
    ("user", 5),
    ("model", 5),
    ("logprobs", 21),
    ("tools", [{"type": "function"}]),
    ("response_format", {"type": "json_object"}),
    ("best_of", 2),
]


@pytest.mark.parametrize(("field", "value"), BAD_SAMPLING, ids=lambda item: str(item)[:20])
def test_wrong_values_are_refused_by_name(field: str, value: Any) -> None:
    for parse, body in ((parse_chat, chat), (parse_completion, completion)):
        with pytest.raises(RequestError) as caught:
            parse(body(**{"max_tokens": 50, field: value}))
        # stream_options names the option inside, logit_bias the key
        assert (caught.value.param or "").split(".")[0].split("[")[0] == field
        assert caught.value.message.startswith(field)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([USER, {"role": "wizard", "content": "hi"}], "messages[1].role"),
        ([{"role": "tool", "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "user", "content": "\udfff"}], "messages[0].content"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0]"),
    ],
)
def test_bad_messages(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_chat({"messages": messages})
    assert caught.value.param == param


@pytest.mark.parametrize("field", sorted(UNSUPPORTED_FIELDS))
def test_unsupported_fields_are_refused_unless_harmless(field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_chat(chat(**{field: {"something": "else"}}))
    assert caught.value.param == field
    for harmless in (None, *UNSUPPORTED_FIELDS[field]):
        parse_chat(chat(**{field: harmless}))


def test_one_is_not_true_for_an_unsupported_field() -> None:
    with pytest.raises(InvalidRequestError):
        parse_chat(chat(add_generation_prompt=1))


def test_fields_that_ask_for_nothing_beyond_others() -> None:
    parse_chat(chat(n=3, best_of=3, top_logprobs=0))
    parse_chat(chat(n=3, best_of=1))
    for fields, param in (
        ({"best_of": 2}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logit_bias": {str(index): 0.0 for index in range(1025)}}, "logit_bias"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            parse_chat(chat(**fields))
        assert caught.value.param == param
    parse_chat(chat(logit_bias={str(index): 0.0 for index in range(1024)}))
