"""The router's routes with a scripted version in place of its pools: lookups, lengths, deadlines, event streams."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import httpx
import pytest

from app import tokenizer as tokenizer_module
from app.config import RouterConfig, RouterSettings, VersionConfig
from app.errors import ConfigError
from app.protocol import GenerateRequest, TokenChunk
from app.serving import router as module
from app.serving.dispatch import PromptRun
from app.serving.router import Router
from app.serving.routing import OutputEstimates, PoolLimits, PoolLoad, PoolName
from tests.serving.scripted import TOKENIZER

Play = Callable[[Sequence[GenerateRequest]], AsyncGenerator[list[TokenChunk], None]]


class ScriptedVersion:
    model = "longspan-tiny"
    app = "pools"
    tokenizer = TOKENIZER
    problem: str | None = None

    def __init__(self, play: Play | None = None) -> None:
        self.limits: dict[PoolName, PoolLimits] = {
            pool: PoolLimits(max_model_len, TOKENIZER.vocab_size, "digest")
            for pool, max_model_len in (("short", 100), ("long", 1000))
        }
        self.estimates = OutputEstimates(20.0)
        self.pool_loads: dict[PoolName, PoolLoad] = {pool: PoolLoad(1) for pool in self.limits}
        self.runs: list[PromptRun] = []
        self.expected: list[PoolName] = []
        self._play = play

    def expect(self, pool: PoolName) -> None:
        self.expected.append(pool)

    def loads(self) -> dict[PoolName, PoolLoad]:
        return self.pool_loads

    def generate(self, run: PromptRun, _deadline_s: float | None) -> AsyncGenerator[list[TokenChunk], None]:
        assert self._play is not None, "nothing should reach a pool"
        self.runs.append(run)
        return self._play(run.requests)


@pytest.fixture
def client_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., httpx.AsyncClient]:
    def build(version: ScriptedVersion, settings: RouterSettings | None = None) -> httpx.AsyncClient:
        monkeypatch.setattr(module, "Version", lambda _config, _settings: version)
        app = Router(
            RouterConfig(versions=(VersionConfig(app="pools"),), settings=settings or RouterSettings())
        ).__serve_build_asgi_app__()
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router")

    return build


ClientOf = Callable[..., httpx.AsyncClient]


def data_events(response: httpx.Response) -> list[Any]:
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


@pytest.mark.asyncio
async def test_a_version_with_a_problem_answers_with_it(client_of: ClientOf) -> None:
    version = ScriptedVersion()
    version.problem = "another tokenizer"
    async with client_of(version) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "another tokenizer")


@pytest.mark.asyncio
async def test_a_conversation_of_many_short_messages_leaves_the_event_loop(
    client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    async def to_thread(function: Callable[[], Any]) -> Any:
        seen.append(function)
        return [1] * 2000  # longer than any pool takes

    monkeypatch.setattr(module.asyncio, "to_thread", to_thread)
    async with client_of(ScriptedVersion()) as client:
        for num_messages in (10, 1000):
            messages = [{"role": "user", "content": ""}] * num_messages
            await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2000})
    assert len(seen) == 1


@pytest.mark.asyncio
async def test_a_model_that_takes_no_traffic_is_not_listed(client_of: ClientOf) -> None:
    client_of(ScriptedVersion())
    versions = tuple(VersionConfig(app=app) for app in ("pools", "other"))
    router = Router(RouterConfig(versions=versions, settings=RouterSettings(weights={"pools": 1})))
    off = ScriptedVersion()
    off.model = "off"
    router._versions["other"] = off  # type: ignore[assignment]
    transport = httpx.ASGITransport(router.__serve_build_asgi_app__())
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        listed = (await client.get("/v1/models")).json()
    assert [one["id"] for one in listed["data"]] == ["longspan-tiny"]


def test_weights_that_leave_no_version_are_refused_and_the_old_ones_stay(client_of: ClientOf) -> None:
    client_of(ScriptedVersion())
    router = Router(RouterConfig())
    router.reconfigure({"weights": {"pools": 2}})
    for weights in ({"pool": 1}, {"pools": 0}):
        with pytest.raises(ConfigError, match=r"^user_config\.weights: "):
            router.reconfigure({"weights": weights})
    assert router._settings.weights == {"pools": 2}


@pytest.mark.asyncio
async def test_a_model_is_looked_up_by_name(client_of: ClientOf) -> None:
    async with client_of(ScriptedVersion()) as client:
        known = await client.get("/v1/models/longspan-tiny")
        listed = await client.get("/v1/models")
        unknown = await client.get("/v1/models/org/other")
    assert known.status_code == 200
    assert (known.json()["id"], known.json()["object"], known.json()["max_model_len"]) == (
        "longspan-tiny",
        "model",
        1000,
    )
    assert listed.json() == {"object": "list", "data": [known.json()]}
    assert unknown.status_code == 404
    error = unknown.json()["error"]
    assert (error["code"], error["param"], error["type"]) == ("model_not_found", "model", "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "prompt", "The cat said hello. " * 200_000),
        ("/v1/completions", "prompt", ["short", "The cat said hello. " * 200_000]),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": "The cat said hello. " * 200_000}]),
    ],
    ids=["prompt", "prompts", "messages"],
)
@pytest.mark.asyncio
async def test_a_body_that_cannot_fit_is_refused_before_encoding(
    client_of: ClientOf, monkeypatch: pytest.MonkeyPatch, path: str, field: str, value: Any
) -> None:
    encode = tokenizer_module._encode

    def encode_short(tokenizer: Any, text: str, **options: Any) -> list[int]:
        assert len(text) < 1000, "the long text, which takes some 3 s"
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(tokenizer_module, "_encode", encode_short)
    async with client_of(ScriptedVersion()) as client:
        response = await client.post(path, json={field: value}, timeout=60)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", field)


@pytest.mark.asyncio
async def test_a_text_may_be_too_long_only_for_the_pools_that_are_up(client_of: ClientOf) -> None:
    version = ScriptedVersion()
    del version.limits["long"]
    async with client_of(version) as client:
        response = await client.post("/v1/completions", json={"prompt": "hello " * 1000})
    assert response.status_code == 503


async def one_token(requests: Sequence[GenerateRequest]) -> AsyncGenerator[list[TokenChunk], None]:
    yield [TokenChunk(requests[0].request_id, (1,), finish_reason="length", text="x", num_output_tokens=1)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.asyncio
async def test_the_pool_gets_the_time_that_is_left(client_of: ClientOf, stream: bool) -> None:
    seen: list[GenerateRequest] = []

    def play(requests: Sequence[GenerateRequest]) -> AsyncGenerator[list[TokenChunk], None]:
        seen.extend(requests)
        return one_token(requests)

    async with client_of(ScriptedVersion(play)) as client:
        body = {"prompt": "hi", "timeout_s": 60.0, "stream": stream}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        late = await client.post("/v1/completions", json={**body, "timeout_s": 1e-9})
    (request,) = seen
    assert request.timeout_s is not None and 30.0 < request.timeout_s < 60.0
    assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"


@pytest.mark.asyncio
async def test_a_streamed_chat_begins_with_the_role_and_ends_with_done(client_of: ClientOf) -> None:
    async with client_of(ScriptedVersion(one_token)) as client:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        response = await client.post("/v1/chat/completions", json=body)
    (event,) = data_events(response)
    assert event["choices"][0]["delta"] == {"role": "assistant", "content": "x"}
    assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.asyncio
async def test_the_pool_follows_load_and_what_the_bucket_was_seen_to_generate(client_of: ClientOf) -> None:
    version = ScriptedVersion(one_token)
    async with client_of(version) as client:

        async def pool_of(**body: Any) -> tuple[str, bool]:
            messages = [{"role": "user", "content": "hi"}]
            response = await client.post("/v1/chat/completions", json={"messages": messages, **body})
            assert response.status_code == 200, response.text
            return version.runs[-1].pool, version.runs[-1].is_spilled

        assert await pool_of(max_tokens=50) == ("short", False)
        version.pool_loads["short"] = PoolLoad(1, waiting_seqs=3)
        assert await pool_of(max_tokens=50) == ("long", True)
        version.pool_loads["long"] = PoolLoad(1, running_seqs=1)
        assert await pool_of(max_tokens=50) == ("short", False)
        for _ in range(500):
            version.estimates.observe("short", 5000, was_cut=False)
        assert await pool_of() == ("long", False)
    assert [run.is_streamed for run in version.runs] == [False] * 4
    assert version.expected == ["long"]


@pytest.mark.asyncio
async def test_spills_can_be_turned_off(client_of: ClientOf) -> None:
    version = ScriptedVersion(one_token)
    version.pool_loads["short"] = PoolLoad(1, waiting_seqs=3)
    async with client_of(version, RouterSettings(spills=False)) as client:
        assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200
    assert [(run.pool, run.is_spilled) for run in version.runs] == [("short", False)]
