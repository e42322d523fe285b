"""OpenAI request bodies -> validated requests. Pure: no tokenizer, no Ray, no HTTP.

    bytes -> parse_json -> dict -> parse_chat / parse_completion -> ApiRequest -> generate_requests -> GenerateRequest

Every refusal is a RequestError whose `param` names the field. As in vLLM, unknown fields are ignored, except those
that would change the answer and are not supported (UNSUPPORTED_FIELDS).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, field_validator, model_validator

from app.errors import ContextLengthError, InvalidRequestError
from app.protocol import MAX_TOP_LOGPROBS, GenerateRequest, SamplingParams

Prompt = str | tuple[int, ...]
Messages = list[dict[str, str]]
MAX_CHOICES = 128  # prompts x n of one HTTP request
MAX_STOP_STRINGS = 16
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; chat takes the rest of the context

# Field -> the values that ask for nothing (null always does).
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}

Int64 = Annotated[StrictInt, Field(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[StrictInt, Field(ge=0, le=2**31 - 1)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, values: Any) -> Any:
        return (
            {name: value for name, value in values.items() if value is not None} if isinstance(values, dict) else values
        )


class _StreamOptions(_Body):
    include_usage: bool = False


class _SamplingBody(_Body):
    """The fields both endpoints share; ranges are SamplingParams' own."""

    model: str | None = None
    max_tokens: Int64 | None = None
    min_tokens: Int64 = 0
    temperature: float = 1.0
    top_k: Int64 | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = {}
    seed: Int64 | None = None
    stop: list[str] = []
    stop_token_ids: list[Count] = []
    ignore_eos: bool = False
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: _StreamOptions | None = None
    priority: Annotated[StrictInt, Field(ge=-(2**31), le=2**31 - 1)] = 0
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    user: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_string(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Raises InvalidRequestError. Without a limit, generate_requests sets one when it knows the prompt's length."""
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"stop: at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}", param="stop")
        for text in self.stop:
            _check_text(text, "stop")
        return SamplingParams(
            max_tokens=2**31 - 1 if max_tokens is None else max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=None if self.top_k in (-1, 0) else self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=_logit_bias(self.logit_bias),
            seed=self.seed,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
        )


class _Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str

    @model_validator(mode="before")
    @classmethod
    def _no_tools(cls, values: Any) -> Any:
        if isinstance(values, dict) and (values.get("tool_calls") or values.get("function_call")):
            raise ValueError("tool calls are not supported")
        return values

    @field_validator("content", mode="before")
    @classmethod
    def _join_text_parts(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        for part in value:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError('only content parts {"type": "text", "text": string} are supported')
        return "".join(part["text"] for part in value)


class _ChatBody(_SamplingBody):
    messages: Annotated[list[_Message], Field(min_length=1)]
    max_completion_tokens: Int64 | None = None
    logprobs: bool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs: needs logprobs: true", param="top_logprobs")
        return self


class _CompletionBody(_SamplingBody):
    prompt: Any
    echo: bool = False
    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class _TokenizeBody(_Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[_Message] | None = None


class _DetokenizeBody(_Body):
    model: str | None = None
    tokens: list[Count]


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A validated body. Either `messages` (chat) or `prompts` (completions) is filled."""

    model: str | None  # None: the first model served
    messages: Messages
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    max_tokens: int | None  # None: the rest of the context
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
    body = validate_body(_ChatBody, values)
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    _check_max_tokens(max_tokens, limit_name)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _api_request(body, _messages(body.messages), (), max_tokens, logprobs, echo=False)


def parse_completion(values: Mapping[str, Any]) -> ApiRequest:
    """/v1/completions. Raises InvalidRequestError."""
    body = validate_body(_CompletionBody, values)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    _check_max_tokens(max_tokens, "max_tokens")
    prompts = parse_prompts(body.prompt)
    if len(prompts) * body.n > MAX_CHOICES:
        raise InvalidRequestError(f"prompt: prompts x n must be at most {MAX_CHOICES}", param="prompt")
    if body.echo and body.logprobs is not None:
        raise InvalidRequestError("logprobs: not supported together with echo", param="logprobs")
    return _api_request(body, [], prompts, max_tokens, body.logprobs, echo=body.echo)


def parse_tokenize(values: Mapping[str, Any]) -> tuple[str | None, str | Messages]:
    """/tokenize: the model and the text or conversation to encode. Raises InvalidRequestError."""
    body = validate_body(_TokenizeBody, values)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("prompt: give either prompt or messages", param="prompt")
    if body.prompt is None:
        return body.model, _messages(body.messages or [])
    _check_text(body.prompt, "prompt")
    return body.model, body.prompt


def parse_detokenize(values: Mapping[str, Any]) -> tuple[str | None, list[int]]:
    """/detokenize: the model and the token ids. Raises InvalidRequestError."""
    body = validate_body(_DetokenizeBody, values)
    return body.model, body.tokens


def parse_prompts(value: Any) -> tuple[Prompt, ...]:
    """A string, a list of strings, token ids, or a list of lists of token ids. Raises InvalidRequestError."""
    if isinstance(value, str):
        return (_prompt(value, "prompt"),)
    if not isinstance(value, list):
        raise InvalidRequestError(
            "prompt: must be a string, a list of strings, token ids, or a list of lists of token ids", param="prompt"
        )
    if value and all(_is_int(item) for item in value):
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
    check_token_ids(prompt_ids, vocab_size, name)
    check_token_ids(api.sampling.stop_token_ids, vocab_size, "stop_token_ids")
    check_token_ids(api.sampling.logit_bias, vocab_size, "logit_bias")
    room = max_model_len - len(prompt_ids)
    max_tokens = room if api.max_tokens is None else api.max_tokens
    if room < 1 or max_tokens > room:
        param = name if room < 1 else "max_tokens"
        raise ContextLengthError(
            f"{param}: the model's context is {max_model_len} tokens, but {len(prompt_ids)} are in the prompt and"
            f" {max(max_tokens, 1)} are asked for",
            param=param,
        )
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


Body = TypeVar("Body", bound=BaseModel)


def validate_body(cls: type[Body], values: Mapping[str, Any]) -> Body:
    """Raises InvalidRequestError that names the first wrong field, in OpenAI's notation: messages[0].content."""
    for name, harmless in UNSUPPORTED_FIELDS.items():
        value = values.get(name)
        if value is not None and not any(type(value) is type(item) and value == item for item in harmless):
            raise InvalidRequestError(f"{name}: not supported", param=name)
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = _field_path(first["loc"])
        raise InvalidRequestError(f"{param}: {first['msg'].removeprefix('Value error, ')}", param=param) from None


def _field_path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path


def _messages(messages: Sequence[_Message]) -> Messages:
    for index, message in enumerate(messages):
        _check_text(message.content, f"messages[{index}].content")
    # OpenAI renamed the role "system"; templates know the old name.
    return [
        {"role": "system" if message.role == "developer" else message.role, "content": message.content}
        for message in messages
    ]


def _api_request(
    body: _SamplingBody,
    messages: Messages,
    prompts: tuple[Prompt, ...],
    max_tokens: int | None,
    logprobs: int | None,
    *,
    echo: bool,
) -> ApiRequest:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options: needs stream: true", param="stream_options")
    return ApiRequest(
        model=body.model,
        messages=messages,
        prompts=prompts,
        sampling=body.sampling(max_tokens, logprobs),
        max_tokens=max_tokens,
        n=body.n,
        stream=body.stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        echo=echo,
        priority=body.priority,
        timeout_s=body.timeout_s,
    )


def _prompt(value: Any, name: str) -> Prompt:
    if isinstance(value, str):
        _check_text(value, name)
        if not value:
            raise InvalidRequestError(f"{name}: must not be empty", param=name)
        return value
    if not isinstance(value, list) or not all(_is_int(item) for item in value):
        raise InvalidRequestError(f"{name}: must be a string or a list of token ids", param=name)
    if not value:
        raise InvalidRequestError(f"{name}: must not be empty", param=name)
    return tuple(value)


def _check_max_tokens(value: int | None, name: str) -> None:
    if value is not None and value < 1:
        raise InvalidRequestError(f"{name}: must be at least 1, got {value}", param=name)


def _check_text(text: str, name: str) -> None:
    """JSON can spell lone surrogates, which no UTF-8 text holds."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{name}: holds a lone surrogate, which is not valid text", param=name) from None


def _logit_bias(values: Mapping[str, float]) -> dict[int, float]:
    bias = {}
    for key, value in values.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidRequestError("logit_bias: keys must be token ids", param="logit_bias")
        bias[int(key)] = value
    return bias


def _add_seed(seed: int, index: int) -> int:
    return (seed + index + 2**63) % 2**64 - 2**63


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
