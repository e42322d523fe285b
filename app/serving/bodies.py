"""The request bodies Longspan reads, as pydantic models: types, shapes and what is not supported.

Every refusal is an InvalidRequestError whose `param` names the field in OpenAI's notation: messages[0].content. As in
vLLM, unknown fields are ignored, except those that would change the answer and are not supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, field_validator, model_validator

from app.errors import InvalidRequestError
from app.protocol import MAX_TOP_LOGPROBS, SamplingParams

MAX_CHOICES = 128  # prompts x n of one HTTP request
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIAS = 1024  # ids; each takes the engine some time for every token

# Field -> the values that ask for nothing (null always does).
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
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


class SamplingBody(_Body):
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
    best_of: Int64 | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    priority: Annotated[StrictInt, Field(ge=-(2**31), le=2**31 - 1)] = 0
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    user: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_string(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _none_is_left_out(self) -> Self:
        if self.best_of not in {None, 1, self.n}:
            raise InvalidRequestError("best_of: not supported beyond n", param="best_of")
        return self

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Raises InvalidRequestError. Without a limit, generate_requests sets one when it knows the prompt's length."""
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"stop: at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}", param="stop")
        for text in self.stop:
            check_text(text, "stop")
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


class Message(_Body):
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


class ChatBody(SamplingBody):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Int64 | None = None
    logprobs: bool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs: needs logprobs: true", param="top_logprobs")
        return self


class CompletionBody(SamplingBody):
    prompt: Any
    echo: bool = False
    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class TokenizeBody(_Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None


class DetokenizeBody(_Body):
    model: str | None = None
    tokens: list[Count]


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


def check_text(text: str, name: str) -> None:
    """JSON can spell lone surrogates, which no UTF-8 text holds."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{name}: holds a lone surrogate, which is not valid text", param=name) from None


def _logit_bias(values: Mapping[str, float]) -> dict[int, float]:
    if len(values) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(
            f"logit_bias: at most {MAX_LOGIT_BIAS} token ids, got {len(values)}", param="logit_bias"
        )
    bias = {}
    for key, value in values.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidRequestError("logit_bias: keys must be token ids", param="logit_bias")
        bias[int(key)] = value
    return bias
