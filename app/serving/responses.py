"""Chunks of text and tokens -> OpenAI response bodies, streamed and whole. Pure; the way back of openai.py."""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.errors import DeadlineExceededError, EngineError, LongspanError, RequestError, UnavailableError
from app.protocol import FinishReason, TokenChunk, TokenLogprob

TokenBytes = Callable[[int], bytes]  # the bytes a token id adds to the text
DONE_EVENT = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What every chunk of one response repeats."""

    response_id: str
    model: str
    is_chat: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, choices: list[dict[str, Any]], *, streamed: bool) -> dict[str, Any]:
        if self.is_chat:
            kind = "chat.completion.chunk" if streamed else "chat.completion"
        else:
            kind = "text_completion"
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def _utf8_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


@dataclass(slots=True)
class Choice:
    """One choice as it grows: `add` takes each chunk once and returns it as a stream's choice object."""

    index: int
    is_chat: bool
    token_bytes: TokenBytes
    echo: str = ""  # the prompt's text, put before the first chunk's
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    has_logprobs: bool = False
    text_offset: int = 0  # of the next token, for completions' logprobs
    decoder: codecs.IncrementalDecoder = field(default_factory=_utf8_decoder)  # a token may end inside a character
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    is_started: bool = False

    def add(self, chunk: TokenChunk) -> dict[str, Any]:
        text = chunk.text
        if not self.is_started:
            text = self.echo + text
            self.text_offset = len(self.echo)
        self.text += text
        if chunk.logprobs is not None:
            self.has_logprobs = True
            self.logprobs.extend(chunk.logprobs)
        self.finish_reason = chunk.finish_reason
        self.stop_reason = chunk.stop_reason
        self.num_prompt_tokens = chunk.num_prompt_tokens
        self.num_cached_tokens = chunk.num_cached_tokens
        self.num_output_tokens = chunk.num_output_tokens
        choice: dict[str, Any] = {"index": self.index}
        if self.is_chat:
            choice["delta"] = {"content": text} if self.is_started else {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        choice["logprobs"] = None if chunk.logprobs is None else self._logprobs(chunk.logprobs)
        choice["finish_reason"] = chunk.finish_reason
        choice["stop_reason"] = chunk.stop_reason
        self.is_started = True
        return choice

    def whole(self) -> dict[str, Any]:
        """The choice of a response that is not streamed; equals the sum of what `add` returned."""
        choice: dict[str, Any] = {"index": self.index}
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": self.text, "refusal": None}
        else:
            choice["text"] = self.text
        self.text_offset, self.decoder = len(self.echo), _utf8_decoder()
        choice["logprobs"] = self._logprobs(self.logprobs) if self.has_logprobs else None
        choice["finish_reason"] = self.finish_reason
        choice["stop_reason"] = self.stop_reason
        return choice

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self.is_chat:
            content = [
                {
                    **_token_entry(self.token_bytes(item.token_id), item.logprob),
                    "top_logprobs": [_token_entry(self.token_bytes(token_id), value) for token_id, value in item.top],
                }
                for item in logprobs
            ]
            return {"content": content, "refusal": None}
        pieces = [self.token_bytes(item.token_id) for item in logprobs]
        offsets = []
        for piece in pieces:
            offsets.append(self.text_offset)
            self.text_offset += len(self.decoder.decode(piece))
        return {
            "tokens": [token_string(piece) for piece in pieces],
            "token_logprobs": [item.logprob for item in logprobs],
            "top_logprobs": [
                {token_string(self.token_bytes(token_id)): value for token_id, value in item.top} for item in logprobs
            ],
            "text_offset": offsets,
        }


def token_string(data: bytes) -> str:
    """A token's text; one that is a fragment of a character is spelled as OpenAI does: bytes:\\xe2\\x80."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _token_entry(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token_string(data), "logprob": logprob, "bytes": list(data)}


def usage(choices: Iterable[Choice], n: int) -> dict[str, Any]:
    """Token counts; the `n` choices of one prompt count its tokens once. Choices are ordered by index."""
    choices = tuple(choices)
    prompt_tokens = sum(choice.num_prompt_tokens for choice in choices[::n])
    completion_tokens = sum(choice.num_output_tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in choices[::n])},
    }


def error_body(error: LongspanError) -> dict[str, Any]:
    param = error.param if isinstance(error, RequestError) else None
    return {"error": {"message": error.message, "type": error.kind, "param": param, "code": error.code}}


def timed_out() -> DeadlineExceededError:
    return DeadlineExceededError("timeout_s: the request did not finish in time")


def chunk_error(chunk: TokenChunk) -> LongspanError | None:
    """The error a chunk's finish_reason stands for, or None for an ordinary end."""
    if chunk.finish_reason == "deadline":
        return timed_out()
    if chunk.finish_reason == "abort":
        return UnavailableError("the replica stopped before the request finished")
    if chunk.finish_reason == "error":
        return EngineError(chunk.error or "the engine failed")
    return None


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + dump(body) + b"\n\n"


def dump(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8")
