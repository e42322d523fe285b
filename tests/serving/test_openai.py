"""OpenAI bodies -> protocol: what is accepted, and that every refusal names its field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.errors import ContextLengthError, InvalidRequestError, RequestError
from app.serving.openai import (
    generate_requests,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_json,
    parse_prompts,
    parse_tokenize,
)

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [USER], **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "hi", **fields}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[1]", "object"),
        (b'"text"', "object"),
        (b"null", "object"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b"[" * 100_000, "JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "JSON"),
    ],
    ids=["empty", "cut", "list", "string", "null", "utf8", "deep", "huge-int"],
)
def test_body_must_be_a_json_object(body: bytes, word: str) -> None:
    with pytest.raises(InvalidRequestError, match=word) as caught:
        parse_json(body)
    assert caught.value.param == "body"


def test_unknown_fields_are_ignored_and_null_means_absent() -> None:
    api = parse_chat(chat(store=True, metadata={"a": 1}, temperature=None, max_tokens=None, stop=None, n=None))
    assert (api.sampling.temperature, api.max_tokens, api.sampling.stop, api.n) == (1.0, None, (), 1)


def test_chat_fields_reach_sampling() -> None:
    api = parse_chat(
        chat(
            max_tokens=3, max_completion_tokens=9, temperature=0, top_k=-1, stop="END", seed=5, logprobs=True,
            top_logprobs=2, logit_bias={"7": -100}, stream=True, stream_options={"include_usage": True}, priority=-1,
        )
    )  # fmt: skip
    sampling = api.sampling
    assert (api.max_tokens, sampling.temperature, sampling.top_k, sampling.stop) == (9, 0.0, None, ("END",))
    assert (sampling.seed, sampling.logprobs, sampling.logit_bias) == (5, 2, {7: -100.0})
    assert (api.stream, api.include_usage, api.priority, api.is_chat) == (True, True, -1, True)


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    api = parse_chat({"messages": [{"role": "developer", "content": parts}]})
    assert api.messages == [{"role": "system", "content": "ab"}]


def test_logprobs_of_chat() -> None:
    assert parse_chat(chat()).sampling.logprobs is None
    assert parse_chat(chat(logprobs=True)).sampling.logprobs == 0
    with pytest.raises(InvalidRequestError) as caught:
        parse_chat(chat(top_logprobs=2))
    assert caught.value.param == "top_logprobs"


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["a", [1]], ("a", (1,))),
    ],
)
def test_prompt_forms(value: Any, prompts: tuple[Any, ...]) -> None:
    assert parse_prompts(value) == prompts


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("", "prompt"), ([], "prompt"), (None, "prompt"), (5, "prompt"), ({}, "prompt"), ([""], "prompt[0]"),
        (["a", ""], "prompt[1]"), ([[]], "prompt[0]"), ([[1], ["a"]], "prompt[1]"), ([True], "prompt[0]"),
        ([1.5], "prompt[0]"), ("\ud800", "prompt"),
    ],
)  # fmt: skip
def test_bad_prompts(value: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_completion({"prompt": value} if value is not None else {})
    assert caught.value.param == param


def test_completion_defaults_and_limits() -> None:
    assert parse_completion(completion()).max_tokens == 16
    with pytest.raises(InvalidRequestError, match="128"):
        parse_completion(completion(prompt=["a"] * 65, n=2))
    with pytest.raises(InvalidRequestError, match="echo"):
        parse_completion(completion(echo=True, logprobs=0))


def requests_of(api_fields: dict[str, Any], ids: list[int], max_model_len: int = 20) -> Any:
    api = parse_completion(completion(**api_fields))
    return generate_requests(api, ids, "r", vocab_size=100, max_model_len=max_model_len)


def test_choices_become_requests_with_their_own_seeds() -> None:
    requests = requests_of({"n": 3, "seed": 2**63 - 2, "max_tokens": 4}, [1, 2])
    assert [request.request_id for request in requests] == ["r-0", "r-1", "r-2"]
    assert [request.sampling.seed for request in requests] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert {request.prompt_token_ids for request in requests} == {(1, 2)}


def test_chat_without_limit_takes_the_rest_of_the_context() -> None:
    (request,) = generate_requests(parse_chat(chat()), [1, 2], "r", vocab_size=100, max_model_len=20)
    assert request.sampling.max_tokens == 18


@pytest.mark.parametrize(
    ("fields", "ids", "error", "param"),
    [
        ({}, [], InvalidRequestError, "prompt"),
        ({}, [100], InvalidRequestError, "prompt"),
        ({}, [-1], InvalidRequestError, "prompt"),
        ({"stop_token_ids": [100]}, [1], InvalidRequestError, "stop_token_ids"),
        ({"logit_bias": {"100": 1}}, [1], InvalidRequestError, "logit_bias"),
        ({"max_tokens": 19}, [1, 2], ContextLengthError, "max_tokens"),
        ({"max_tokens": 1}, [1] * 20, ContextLengthError, "prompt"),
    ],
)
def test_what_the_pool_cannot_hold(fields: Any, ids: list[int], error: type[RequestError], param: str) -> None:
    with pytest.raises(error) as caught:
        requests_of(fields, ids)
    assert caught.value.param == param


def test_a_limit_that_is_too_large_is_refused_by_the_name_it_came_by() -> None:
    api = parse_chat(chat(max_completion_tokens=19))
    with pytest.raises(ContextLengthError) as caught:
        generate_requests(api, [1, 2], "r", vocab_size=100, max_model_len=20)
    assert caught.value.param == "max_completion_tokens"


def test_limits_are_inclusive() -> None:
    assert requests_of({"max_tokens": 18}, [0, 99])[0].sampling.max_tokens == 18


def test_tokenize_bodies() -> None:
    assert parse_tokenize({"prompt": ""}) == (None, "")
    assert parse_tokenize({"model": "m", "messages": [USER]}) == ("m", [USER])
    assert parse_detokenize({"tokens": [1, 2]}) == (None, [1, 2])
    for body in ({}, {"prompt": "a", "messages": [USER]}):
        with pytest.raises(InvalidRequestError):
            parse_tokenize(body)
    with pytest.raises(InvalidRequestError) as caught:
        parse_detokenize({"tokens": [1, -1]})
    assert caught.value.param == "tokens[1]"


def test_nan_literal_of_json_is_refused() -> None:
    values = parse_json(b'{"prompt": "a", "temperature": NaN}')
    with pytest.raises(InvalidRequestError, match="temperature"):
        parse_completion(values)
    assert json.loads("NaN") != json.loads("NaN")
