"""Response bodies: what is streamed adds up to what is not, logprobs and usage included."""

from __future__ import annotations

import json

import pytest

from app.errors import ContextLengthError, DeadlineExceededError, EngineError, UnavailableError
from app.protocol import TokenChunk, TokenLogprob
from app.serving.responses import Choice, ResponseHead, chunk_error, dump, error_body, event, token_string, usage

TOKENS = [b"He", b"llo", b" \xe2\x82", b"\xac", b""]


def token_bytes(token_id: int) -> bytes:
    return TOKENS[token_id]


def chunks(*, logprobs: bool = True) -> list[TokenChunk]:
    pairs = [((0,), "He"), ((1, 2), "llo "), ((3,), "€"), ((4,), "")]
    result, count = [], 0
    for token_ids, text in pairs:
        count += len(token_ids)
        values = tuple(TokenLogprob(token_id, -0.5 * token_id, ((3, -0.1),)) for token_id in token_ids)
        result.append(
            TokenChunk(
                "r",
                token_ids,
                logprobs=values if logprobs else None,
                finish_reason="stop" if token_ids == (4,) else None,
                stop_reason=4 if token_ids == (4,) else None,
                num_prompt_tokens=7,
                num_cached_tokens=2,
                num_output_tokens=count,
                text=text,
            )
        )
    return result


def test_streamed_chat_equals_whole() -> None:
    choice = Choice(0, True, token_bytes)
    deltas = [choice.add(chunk) for chunk in chunks()]
    whole = choice.whole()
    assert deltas[0]["delta"] == {"role": "assistant", "content": "He"}
    assert all("role" not in delta["delta"] for delta in deltas[1:])
    assert "".join(delta["delta"]["content"] for delta in deltas) == whole["message"]["content"] == "Hello €"
    assert [entry for delta in deltas for entry in delta["logprobs"]["content"]] == whole["logprobs"]["content"]
    assert [delta["finish_reason"] for delta in deltas] == [None, None, None, "stop"]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", 4)


def test_chat_logprobs_carry_bytes_of_half_characters() -> None:
    choice = Choice(0, True, token_bytes)
    for chunk in chunks():
        choice.add(chunk)
    entry = choice.whole()["logprobs"]["content"][2]
    assert entry["token"] == "bytes:\\x20\\xe2\\x82" and entry["bytes"] == [32, 226, 130]
    assert entry["top_logprobs"] == [{"token": "bytes:\\xac", "logprob": -0.1, "bytes": [172]}]


def test_streamed_completion_equals_whole_with_echo() -> None:
    choice = Choice(1, False, token_bytes, echo="Say: ")
    deltas = [choice.add(chunk) for chunk in chunks()]
    whole = choice.whole()
    assert "".join(delta["text"] for delta in deltas) == whole["text"] == "Say: Hello €"
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for delta in deltas for item in delta["logprobs"][name]] == whole["logprobs"][name]
    # Characters of "Say: Hello €", not bytes: " " comes with the third token, "€" with the fourth that completes it.
    assert whole["logprobs"]["text_offset"] == [5, 7, 10, 11, 12]
    assert whole["index"] == 1


def test_without_logprobs_the_field_is_null() -> None:
    choice = Choice(0, True, token_bytes)
    assert all(choice.add(chunk)["logprobs"] is None for chunk in chunks(logprobs=False))
    assert choice.whole()["logprobs"] is None


def test_usage_counts_a_prompt_once_for_its_choices() -> None:
    choices = []
    for index in range(4):
        choice = Choice(index, True, token_bytes)
        for chunk in chunks():
            choice.add(chunk)
        choices.append(choice)
    assert usage(choices, 2) == {
        "prompt_tokens": 14,
        "completion_tokens": 20,
        "total_tokens": 34,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


@pytest.mark.parametrize(
    ("is_chat", "streamed", "kind"),
    [(True, True, "chat.completion.chunk"), (True, False, "chat.completion"), (False, True, "text_completion")],
)
def test_head(is_chat: bool, streamed: bool, kind: str) -> None:
    body = ResponseHead("id", "m", is_chat).body([], streamed=streamed)
    assert (body["id"], body["object"], body["model"], body["choices"]) == ("id", kind, "m", [])


def test_error_bodies() -> None:
    assert error_body(ContextLengthError("too long", param="prompt")) == {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": "prompt",
            "code": "context_length_exceeded",
        }
    }
    assert error_body(EngineError("x"))["error"]["param"] is None


@pytest.mark.parametrize(
    ("reason", "error"),
    [("deadline", DeadlineExceededError), ("abort", UnavailableError), ("error", EngineError)],
)
def test_ends_that_are_errors(reason: str, error: type[Exception]) -> None:
    assert isinstance(chunk_error(TokenChunk("r", (), finish_reason=reason, error="boom")), error)  # type: ignore[arg-type]
    assert chunk_error(TokenChunk("r", (1,), finish_reason="length")) is None


def test_events_are_one_line_of_json() -> None:
    data = event({"text": "a\nb€"})
    assert data.startswith(b"data: ") and data.endswith(b"\n\n") and data.count(b"\n") == 2
    assert json.loads(data[6:]) == {"text": "a\nb€"}


def test_no_nan_leaves() -> None:
    with pytest.raises(ValueError, match="JSON"):
        dump({"logprob": float("nan")})


def test_token_string() -> None:
    assert token_string("€".encode()) == "€"
    assert token_string(b"\xff") == "bytes:\\xff"
