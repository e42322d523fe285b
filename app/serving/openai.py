"""OpenAI request bodies -> validated requests. Pure: no tokenizer, no Ray, no HTTP.

    bytes -> parse_json -> dict -> parse_chat / parse_completion -> ApiRequest -> generate_requests -> GenerateRequest

Every refusal is a RequestError whose `param` names the field.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.errors import ContextLengthError, InvalidRequestError
from app.protocol import GenerateRequest, SamplingParams
from app.serving.bodies import (
    MAX_CHOICES,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Message,
    SamplingBody,
    TokenizeBody,
    check_text,
    validate_body,
)

Prompt = str | tuple[int, ...]
Messages = list[dict[str, str]]
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; chat takes the rest of the context


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A validated body. Either `messages` (chat) or `prompts` (completions) is filled."""

    model: str | None  # None: the first model served
    messages: Messages
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    max_tokens: int | None  # None: the rest of the context
    max_tokens_name: str  # the field it came from
    n: int
    stream: bool
    include_usage: bool
    echo: bool
    priority: int
    timeout_s: float | None

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)


def parse_json(body: bytes) -> dict[str, Any]:
    """Raises InvalidRequestError unless `body` is a UTF-8 JSON object."""
    try:
        values = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"body: not valid UTF-8 at byte {error.start}", param="body") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"body: not valid JSON: {error}", param="body") from None
    if not isinstance(values, dict):
        raise InvalidRequestError(f"body: must be a JSON object, got {type(values).__name__}", param="body")
    return values


def parse_chat(values: Mapping[str, Any]) -> ApiRequest:
    """/v1/chat/completions. Raises InvalidRequestError."""
    body = validate_body(ChatBody, values)
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    _check_max_tokens(max_tokens, limit_name)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _api_request(body, _messages(body.messages), (), max_tokens, logprobs, limit_name)


def parse_completion(values: Mapping[str, Any]) -> ApiRequest:
    """/v1/completions. Raises InvalidRequestError."""
    body = validate_body(CompletionBody, values)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    _check_max_tokens(max_tokens, "max_tokens")
    prompts = parse_prompts(body.prompt)
    if len(prompts) * body.n > MAX_CHOICES:
        raise InvalidRequestError(f"prompt: prompts x n must be at most {MAX_CHOICES}", param="prompt")
    if body.echo and body.logprobs is not None:
        raise InvalidRequestError("logprobs: not supported together with echo", param="logprobs")
    return _api_request(body, [], prompts, max_tokens, body.logprobs, "max_tokens", echo=body.echo)


def parse_tokenize(values: Mapping[str, Any]) -> tuple[str | None, str | Messages]:
    """/tokenize: the model and the text or conversation to encode. Raises InvalidRequestError."""
    body = validate_body(TokenizeBody, values)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("prompt: give either prompt or messages", param="prompt")
    if body.prompt is None:
        return body.model, _messages(body.messages or [])
    check_text(body.prompt, "prompt")
    return body.model, body.prompt


def parse_detokenize(values: Mapping[str, Any]) -> tuple[str | None, list[int]]:
    """/detokenize: the model and the token ids. Raises InvalidRequestError."""
    body = validate_body(DetokenizeBody, values)
    return body.model, body.tokens


def parse_prompts(value: Any) -> tuple[Prompt, ...]:
    """A string, a list of strings, token ids, or a list of lists of token ids. Raises InvalidRequestError."""
    if isinstance(value, str):
        return (_prompt(value, "prompt"),)
    if not isinstance(value, list):
        raise InvalidRequestError(
            "prompt: must be a string, a list of strings, token ids, or a list of lists of token ids", param="prompt"
        )
    if value and _are_ints(value):
        return (_prompt(value, "prompt"),)
    if not value:
        raise InvalidRequestError("prompt: must not be empty", param="prompt")
    return tuple(_prompt(item, f"prompt[{index}]") for index, item in enumerate(value))


def generate_requests(
    api: ApiRequest, prompt_ids: Sequence[int], request_id: str, *, vocab_size: int, max_model_len: int
) -> tuple[GenerateRequest, ...]:
    """The `n` sequences of one prompt, ids `request_id-0` onwards. With a seed, choice i uses seed + i, as in vLLM.

    Raises InvalidRequestError or ContextLengthError against the limits of the pool.
    """
    name = "messages" if api.is_chat else "prompt"
    if not prompt_ids:
        raise InvalidRequestError(f"{name}: must not be empty", param=name)
    room = max_model_len - len(prompt_ids)
    max_tokens = room if api.max_tokens is None else api.max_tokens
    if room < 1 or max_tokens > room:
        param = name if room < 1 else api.max_tokens_name
        raise ContextLengthError(
            f"{param}: the model's context is {max_model_len} tokens, but {len(prompt_ids)} are in the prompt and"
            f" {max(max_tokens, 1)} are asked for",
            param=param,
        )
    check_token_ids(prompt_ids, vocab_size, name)
    check_token_ids(api.sampling.stop_token_ids, vocab_size, "stop_token_ids")
    check_token_ids(api.sampling.logit_bias, vocab_size, "logit_bias")
    sampling = replace(api.sampling, max_tokens=max_tokens)
    return tuple(
        GenerateRequest(
            request_id=f"{request_id}-{index}",
            prompt_token_ids=tuple(prompt_ids),
            sampling=sampling if sampling.seed is None else replace(sampling, seed=_add_seed(sampling.seed, index)),
            priority=api.priority,
            timeout_s=api.timeout_s,
        )
        for index in range(api.n)
    )


def check_token_ids(token_ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Raises InvalidRequestError for the first id outside the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(f"{param}: token id {token_id} is outside [0, {vocab_size})", param=param)


def _messages(messages: Sequence[Message]) -> Messages:
    for index, message in enumerate(messages):
        check_text(message.content, f"messages[{index}].content")
    # OpenAI renamed the role "system"; templates know the old name.
    return [
        {"role": "system" if message.role == "developer" else message.role, "content": message.content}
        for message in messages
    ]


def _api_request(
    body: SamplingBody,
    messages: Messages,
    prompts: tuple[Prompt, ...],
    max_tokens: int | None,
    logprobs: int | None,
    max_tokens_name: str,
    *,
    echo: bool = False,
) -> ApiRequest:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options: needs stream: true", param="stream_options")
    return ApiRequest(
        model=body.model,
        messages=messages,
        prompts=prompts,
        sampling=body.sampling(max_tokens, logprobs),
        max_tokens=max_tokens,
        max_tokens_name=max_tokens_name,
        n=body.n,
        stream=body.stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        echo=echo,
        priority=body.priority,
        timeout_s=body.timeout_s,
    )


def _prompt(value: Any, name: str) -> Prompt:
    if isinstance(value, str):
        check_text(value, name)
        if not value:
            raise InvalidRequestError(f"{name}: must not be empty", param=name)
        return value
    if not isinstance(value, list) or not _are_ints(value):
        raise InvalidRequestError(f"{name}: must be a string or a list of token ids", param=name)
    if not value:
        raise InvalidRequestError(f"{name}: must not be empty", param=name)
    return tuple(value)


def _check_max_tokens(value: int | None, name: str) -> None:
    if value is not None and value < 1:
        raise InvalidRequestError(f"{name}: must be at least 1, got {value}", param=name)


def _add_seed(seed: int, index: int) -> int:
    return (seed + index + 2**63) % 2**64 - 2**63


def _are_ints(values: list[Any]) -> bool:
    """By their types alone, which are JSON's: true and false are none, and 64k ids take a millisecond."""
    return set(map(type, values)) <= {int}
