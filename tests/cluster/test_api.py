"""The OpenAI API on a real Serve instance: the client's view of streams, choices, logprobs, stops and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.cluster.conftest import ANSWER_TIMEOUT_S, Server, eventually

pytestmark = pytest.mark.timeout(400)  # the first test also starts the cluster

MODEL = "longspan-tiny"
MESSAGES: Any = [{"role": "user", "content": "Tell me about the weather in the mountains."}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=ANSWER_TIMEOUT_S
    ) as client:
        yield client


def post(server: Server, path: str, **request: Any) -> httpx.Response:
    return httpx.post(server.url + path, timeout=ANSWER_TIMEOUT_S, **request)


def get(server: Server, path: str, **request: Any) -> httpx.Response:
    return httpx.get(server.url + path, timeout=ANSWER_TIMEOUT_S, **request)


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    response = post(server, "/v1/completions", json={"model": MODEL, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_chat_streamed_equals_whole(client: openai.OpenAI, temperature: float) -> None:
    request: Any = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 48,
        "temperature": temperature,
        "seed": 7,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    *body, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in body) == whole.choices[0].message.content
    streamed = [
        entry for chunk in body if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content or []
    ]
    assert whole.choices[0].logprobs is not None
    assert streamed == whole.choices[0].logprobs.content
    assert len(streamed) == whole.usage.completion_tokens  # type: ignore[union-attr]
    assert all(len(entry.top_logprobs) == 3 for entry in streamed)
    assert [chunk.choices[0].finish_reason for chunk in body[:-1]] == [None] * (len(body) - 1)
    assert body[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(chunk.usage is None for chunk in body) and last.choices == []
    assert last.usage is not None and whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_completion_streamed_equals_whole(client: openai.OpenAI) -> None:
    request: Any = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 32, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**request, echo=False).choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**request, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert whole.logprobs is not None
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        streamed = [item for chunk in chunks if chunk.logprobs for item in getattr(chunk.logprobs, name)]
        assert streamed == getattr(whole.logprobs, name)


def test_choices_differ_by_seed_and_each_can_be_repeated(client: openai.OpenAI) -> None:
    request: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "temperature": 1.0}
    whole = client.chat.completions.create(**request, n=2, seed=11)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1] and texts[0] != texts[1]
    streamed = ["", ""]
    for chunk in client.chat.completions.create(**request, n=2, seed=11, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts
    alone = client.chat.completions.create(**request, seed=12)
    assert alone.choices[0].message.content == texts[1]
    assert whole.usage is not None and alone.usage is not None
    assert whole.usage.prompt_tokens == alone.usage.prompt_tokens


def test_prompts_in_all_forms(server: Server) -> None:
    ids = post(server, "/tokenize", json={"prompt": "The sun"}).json()["tokens"]
    assert post(server, "/detokenize", json={"tokens": ids}).json() == {"prompt": "The sun"}
    alone = complete(server, prompt="The sun", max_tokens=8)["choices"][0]["text"]
    for prompt in (["The sun", "A dog"], [ids, [5, 6, 7]], ["The sun", ids]):
        choices = complete(server, prompt=prompt, max_tokens=8)["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        assert choices[0]["text"] == alone
    echoed = complete(server, prompt=ids, max_tokens=8, echo=True)["choices"][0]["text"]
    assert echoed == "The sun" + alone


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_across_tokens(server: Server, stream: bool) -> None:
    text = complete(server, prompt="Once upon a time", max_tokens=40)["choices"][0]["text"]
    middle = len(text) // 2
    stop = text[middle - 3 : middle + 4]
    fields = {"prompt": "Once upon a time", "max_tokens": 40, "stop": [stop]}
    stopped = server.metric("request_success_total", finished_reason="stop")
    if stream:
        lines = post(
            server, "/v1/completions", json={"model": MODEL, "temperature": 0, "stream": True, **fields}
        ).text.splitlines()
        assert lines[-2] == "data: [DONE]"
        choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        got, end = "".join(choice["text"] for choice in choices), choices[-1]
    else:
        end = complete(server, **fields)["choices"][0]
        got = end["text"]
    assert got == text[: text.index(stop)]
    assert (end["finish_reason"], end["stop_reason"]) == ("stop", stop)
    eventually(lambda: server.metric("request_success_total", finished_reason="stop") > stopped)


def test_long_prompts_go_to_the_long_pool(server: Server) -> None:
    before = server.metric("num_steps_total", pool="long")
    complete(server, prompt=[10] * 4200, max_tokens=2)
    eventually(lambda: server.metric("num_steps_total", pool="long") > before)


BAD_REQUESTS: list[tuple[str, dict[str, Any], int, str]] = [
    ("empty prompt", {"json": {"prompt": ""}}, 400, "prompt"),
    ("no prompt", {"json": {}}, 400, "prompt"),
    ("zero max_tokens", {"json": {"prompt": "a", "max_tokens": 0}}, 400, "max_tokens"),
    ("negative max_tokens", {"json": {"prompt": "a", "max_tokens": -5}}, 400, "max_tokens"),
    ("NaN temperature", {"content": b'{"prompt": "a", "temperature": NaN}'}, 400, "temperature"),
    ("unknown model", {"json": {"prompt": "a", "model": "gpt-99"}}, 404, "model"),
    ("token id too high", {"json": {"prompt": [8192]}}, 400, "prompt"),
    ("token id negative", {"json": {"prompt": [-1]}}, 400, "prompt"),
    ("over the context", {"json": {"prompt": [1] * 16384}}, 400, "prompt"),
    ("answer over the context", {"json": {"prompt": "a", "max_tokens": 16384}}, 400, "max_tokens"),
    ("a list", {"json": [1, 2]}, 400, "body"),
    ("invalid UTF-8", {"content": b'{"prompt": "\xff\xfe"}'}, 400, "body"),
    ("not JSON", {"content": b"prompt=a"}, 400, "body"),
    ("nothing", {"content": b""}, 400, "body"),
    ("10 MB", {"content": b'{"prompt": "' + b"a" * 10_000_000 + b'"}'}, 413, "body"),
    ("stream of a bad one", {"json": {"prompt": "a", "stream": True, "top_p": 7}}, 400, "top_p"),
    ("tools", {"json": {"prompt": "a", "tools": [{}]}}, 400, "tools"),
]


@pytest.mark.parametrize(
    ("request_", "status", "param"), [item[1:] for item in BAD_REQUESTS], ids=[x[0] for x in BAD_REQUESTS]
)
def test_bad_input_is_refused_by_name_and_the_next_request_served(
    server: Server, request_: dict[str, Any], status: int, param: str
) -> None:
    response = post(server, "/v1/completions", **request_)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param and param in error["message"]
    assert complete(server, prompt="Good morning", max_tokens=2)["choices"][0]["finish_reason"] == "length"


def test_bad_messages_through_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "wizard", "content": "x"}])  # type: ignore[list-item]
    assert caught.value.param == "messages[0].role"


def test_other_routes(server: Server) -> None:
    models = get(server, "/v1/models").json()
    assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [(MODEL, 16384)]
    assert get(server, "/health").status_code == 200
    version = get(server, "/version").json()
    assert version["versions"]["pools"]["model"] == MODEL and len(version["versions"]["pools"]["digest"]) >= 32
    missing = get(server, "/v2/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "not_found"
    wrong = get(server, "/v1/completions")
    assert wrong.status_code == 405 and wrong.json()["error"]["code"] == "method_not_allowed"
    assert "POST" in wrong.headers["allow"]


def test_request_id_comes_back(server: Server) -> None:
    sent = get(server, "/health", headers={"X-Request-Id": "abc-123"})
    assert sent.headers.get_list("x-request-id") == ["abc-123"]
    assert len(get(server, "/health").headers["x-request-id"]) >= 16
