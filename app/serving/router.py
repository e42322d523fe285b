"""The ingress deployment: the HTTP routes in front of the pools.

body -> openai.py -> tokenizer -> routing.py -> Generation -> body or events
"""

from __future__ import annotations

import asyncio
import gc
import random
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.config import RouterConfig, RouterSettings, load_config
from app.errors import ConfigError, LongspanError, ModelNotFoundError, UnavailableError
from app.serving import http, openai
from app.serving.admission import Admission, ConcurrencyLimit
from app.serving.dispatch import PromptRun
from app.serving.generation import Generation
from app.serving.metrics import render
from app.serving.openai import ApiRequest, Messages, Prompt
from app.serving.responses import ResponseHead, timed_out
from app.serving.routing import POOLS, bucket_of, choose_pool, choose_version
from app.serving.versions import Version

# Encoding this many characters takes some 10 ms: longer texts leave the event loop to the other requests.
INLINE_ENCODE_CHARS = 32_768
MESSAGE_CHARS = 64  # what the template takes for a message, as if it were text


class Router:
    """The deployment class. Stateless apart from what its versions' monitors last said: any number may run."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._settings = config.settings
        self._versions = {version.app: Version(version, lambda: self._settings) for version in config.versions}

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take what may change at run time (RouterSettings)."""
        settings = load_config(RouterSettings, user_config, where="user_config")
        if problem := self._config.problem_of(settings):
            raise ConfigError(f"user_config.{problem}", field="user_config.weights")
        self._settings = settings

    def __serve_build_asgi_app__(self) -> Starlette:
        limit = ConcurrencyLimit(lambda: self._settings.max_ongoing_requests)
        admission = [Middleware(Admission, limit=limit)]
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat_completions, methods=["POST"], middleware=admission),
                Route("/v1/completions", self.completions, methods=["POST"], middleware=admission),
                Route("/v1/models", self.models, methods=["GET"]),
                Route("/v1/models/{name:path}", self.model, methods=["GET"]),
                Route("/tokenize", self.tokenize, methods=["POST"], middleware=admission),
                Route("/detokenize", self.detokenize, methods=["POST"], middleware=admission),
                Route("/health", self.health, methods=["GET"]),
                Route("/ready", self.ready, methods=["GET"]),
                Route("/version", self.version, methods=["GET"]),
                Route("/metrics", self.metrics, methods=["GET"]),
            ],
            exception_handlers={
                LongspanError: http.handle_longspan_error,
                http.ClientDisconnected: http.handle_disconnect,
                HTTPException: http.handle_http_exception,
                Exception: http.handle_any_error,
            },
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        gc.freeze()  # see Replica
        polls = [asyncio.create_task(version.poll_forever()) for version in self._versions.values()]
        try:
            yield
        finally:
            for poll in polls:
                poll.cancel()

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, openai.parse_chat(await self._body(request)))

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, openai.parse_completion(await self._body(request)))

    async def models(self, _request: Request) -> Response:
        by_name = {version.model: version for version in self._in_traffic()}
        data = [_model_entry(name, version) for name, version in by_name.items()]
        return http.JSONBody({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        return http.JSONBody(_model_entry(name, self._choose_version(name)))

    async def tokenize(self, request: Request) -> Response:
        model, prompt = openai.parse_tokenize(await self._body(request))
        version = self._choose_version(model)
        ids = await _encode(version, prompt)
        limits = version.limits.get("long")
        max_model_len = None if limits is None else limits.max_model_len
        return http.JSONBody({"count": len(ids), "max_model_len": max_model_len, "tokens": ids})

    async def detokenize(self, request: Request) -> Response:
        model, token_ids = openai.parse_detokenize(await self._body(request))
        tokenizer = self._choose_version(model).tokenizer
        openai.check_token_ids(token_ids, tokenizer.vocab_size, "tokens")
        return http.JSONBody({"prompt": tokenizer.decode(token_ids, skip_special_tokens=False)})

    async def health(self, _request: Request) -> Response:
        return http.JSONBody({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        """200 once every pool of some version that takes traffic has a replica."""
        if any(version.ready_pools == set(POOLS) for version in self._in_traffic()):
            return http.JSONBody({"status": "ready"})
        raise UnavailableError("no version has replicas in every pool yet", retry_after_s=2.0)

    async def version(self, _request: Request) -> Response:
        versions = {
            version.app: {"model": version.model, "digest": next((x.version for x in version.limits.values()), None)}
            for version in self._versions.values()
        }
        return http.JSONBody({"version": metadata.version("longspan"), "versions": versions})

    async def metrics(self, _request: Request) -> Response:
        series = [series for version in self._versions.values() for series in version.series()]
        routers = [series for version in self._versions.values() for series in version.router_series()]
        scaling = [series for version in self._versions.values() for series in version.scaling_series()]
        return Response(render(series, routers, scaling), media_type=CONTENT_TYPE_LATEST)

    async def _body(self, request: Request) -> dict[str, Any]:
        return openai.parse_json(await http.read_body(request, self._config.max_body_bytes))

    async def _generate(self, request: Request, api: ApiRequest) -> Response:
        started_s = asyncio.get_running_loop().time()
        timeout_s = api.timeout_s or self._settings.default_timeout_s
        version = self._choose_version(api.model)
        # Ids are ours: two clients may send the same X-Request-Id.
        request_id = uuid.uuid4().hex
        deadline_s = None if timeout_s is None else started_s + timeout_s
        runs = await self._plan(version, api, request_id, deadline_s)
        head = ResponseHead(f"{'chatcmpl' if api.is_chat else 'cmpl'}-{request_id}", version.model, api.is_chat)
        generation = Generation(version, head, runs, n=api.n, deadline_s=deadline_s)
        await http.until_disconnect(request.receive, generation.start())
        if api.stream:
            return http.EventStream(generation.events(include_usage=api.include_usage), generation.close)
        try:
            return http.JSONBody(await http.until_disconnect(request.receive, generation.whole()))
        finally:
            await generation.close()

    def _in_traffic(self) -> list[Version]:
        weights = self._settings.weights
        return [version for app, version in self._versions.items() if not weights or weights.get(app)]

    def _choose_version(self, model: str | None) -> Version:
        name = next(iter(self._versions.values())).model if model is None else model
        apps = [app for app, version in self._versions.items() if version.model == name]
        if not apps:
            raise ModelNotFoundError(f"model: {name[:100]!r} is not served here", param="model")
        version = self._versions[choose_version(apps, self._settings.weights, random.random())]
        if version.problem is not None:
            raise UnavailableError(version.problem)
        return version

    async def _plan(
        self, version: Version, api: ApiRequest, request_id: str, deadline_s: float | None
    ) -> Sequence[PromptRun]:
        """The pool and the sequences of every prompt.

        Raises RequestError, UnavailableError while pools start, DeadlineExceededError if encoding takes too long.
        """
        runs = []
        limits = version.limits
        prompts: Sequence[Prompt | Messages] = [api.messages] if api.is_chat else api.prompts
        # A pool that has not come up yet may have more room than those that have.
        max_model_len = max(limit.max_model_len for limit in limits.values()) if limits.keys() == set(POOLS) else None
        for index, prompt in enumerate(prompts):
            ids = await _encode(version, prompt, max_model_len)
            bucket = bucket_of(len(ids), self._settings)
            choose = partial(
                choose_pool,
                len(ids),
                api.max_tokens,
                limits,
                self._settings,
                expected_output_tokens=version.estimates.expected_tokens(bucket),
            )
            pool = choose(loads=version.loads() if self._settings.spills else None)
            is_spilled = self._settings.spills and pool != choose()
            if is_spilled:
                version.expect(pool)
            requests = openai.generate_requests(
                replace(api, timeout_s=_remaining_s(deadline_s)),
                ids,
                f"{request_id}-{index}",
                vocab_size=limits[pool].vocab_size,
                max_model_len=limits[pool].max_model_len,
            )
            echo = ""
            if api.echo:
                echo = prompt if isinstance(prompt, str) else version.tokenizer.decode(ids)
            runs.append(PromptRun(pool, requests, bucket, echo, api.stream, is_spilled))
        return PromptRun.together(runs)


def _remaining_s(deadline_s: float | None) -> float | None:
    """Seconds until then, which is all that another process can use. Raises DeadlineExceededError."""
    if deadline_s is None:
        return None
    remaining_s = deadline_s - asyncio.get_running_loop().time()
    if remaining_s <= 0.0:
        raise timed_out()
    return remaining_s


def _model_entry(name: str, version: Version) -> dict[str, Any]:
    long = version.limits.get("long")
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "longspan",
        "max_model_len": None if long is None else long.max_model_len,
    }


async def _encode(version: Version, prompt: Prompt | Messages, max_tokens: int | None = None) -> list[int]:
    """Token ids of a text, of token ids (themselves) or of a conversation.

    Raises InvalidRequestError, and ContextLengthError for a text that is far too long for `max_tokens`.
    """
    if isinstance(prompt, tuple):
        return list(prompt)
    tokenizer = version.tokenizer
    if isinstance(prompt, str):
        num_chars, encode = len(prompt), partial(tokenizer.encode, prompt, max_tokens=max_tokens)
    else:
        num_chars = sum(len(message["content"]) + MESSAGE_CHARS for message in prompt)
        encode = partial(tokenizer.apply_chat_template, prompt, max_tokens=max_tokens)
    return encode() if num_chars < INLINE_ENCODE_CHARS else await asyncio.to_thread(encode)
