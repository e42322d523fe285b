"""One HTTP request's choices: merged streams, events, whole bodies, failures and deadlines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any, cast

import pytest

from app.errors import DeadlineExceededError, EngineError, LongspanError, OverloadedError
from app.protocol import GenerateRequest, SamplingParams, TokenChunk
from app.serving import generation as module
from app.serving.dispatch import PromptRun
from app.serving.generation import Generation, merge
from app.serving.responses import ResponseHead
from app.serving.versions import Version
from tests.serving.scripted import TOKENIZER

Script = Sequence[list[TokenChunk] | LongspanError | float]  # items, a failure, or seconds of silence
IN_TIME_S = 1.0  # what is there at once is there by then, on a busy machine too


class ScriptedVersion:
    """Plays a script per prompt; counts the streams that were closed."""

    tokenizer = TOKENIZER

    def __init__(self, *scripts: Script) -> None:
        self._scripts = iter(scripts)
        self.num_open = 0
        self.num_cut = 0  # closed before the script's last step

    def generate(self, _run: PromptRun | None, _deadline_s: float | None) -> AsyncGenerator[list[TokenChunk], None]:
        return self._play(next(self._scripts))

    async def _play(self, script: Script) -> AsyncGenerator[list[TokenChunk], None]:
        self.num_open += 1
        num_left = len(script)
        try:
            for step in script:
                await asyncio.sleep(step if isinstance(step, float) else 0.0)
                num_left -= 1
                if isinstance(step, LongspanError):
                    raise step
                if isinstance(step, list):
                    yield step
        finally:
            self.num_open -= 1
            self.num_cut += num_left > 0


def chunk(name: str, text: str, finish: Any = None, count: int = 1) -> TokenChunk:
    return TokenChunk(name, (1,), finish_reason=finish, text=text, num_prompt_tokens=3, num_output_tokens=count)


def generation(
    version: ScriptedVersion,
    *groups: str,
    n: int = 1,
    timeout_s: float | None = None,
    is_chat: bool = False,
    echo: str = "",
) -> Generation:
    runs = [
        PromptRun("short", tuple(GenerateRequest(name, (1,), SamplingParams()) for name in group), "short", echo)
        for group in groups
    ]
    deadline_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    head = ResponseHead("id", "m", is_chat=is_chat)
    return Generation(cast(Version, version), head, runs, n=n, deadline_s=deadline_s)


async def events(running: Generation, *, include_usage: bool = False) -> list[Any]:
    data = b"".join([part async for part in running.events(include_usage=include_usage)]).decode()
    lines = [part.removeprefix("data: ") for part in data.split("\n\n")[:-1]]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


TWO_CHOICES: Script = [
    [chunk("a", "x"), chunk("b", "1")],
    [chunk("b", "2", "stop", 2)],
    [chunk("a", "y", "length", 2)],
]


@pytest.mark.asyncio
async def test_choices_streamed_and_whole() -> None:
    running = generation(ScriptedVersion(TWO_CHOICES), "ab", n=2)
    await running.start()
    body = await running.whole()
    assert [(choice["text"], choice["finish_reason"]) for choice in body["choices"]] == [
        ("xy", "length"),
        ("12", "stop"),
    ]
    assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["completion_tokens"] == 4
    running = generation(ScriptedVersion(TWO_CHOICES), "ab", n=2)
    await running.start()
    *parts, last, done = await events(running, include_usage=True)
    texts = ["", ""]
    for part in parts:
        texts[part["choices"][0]["index"]] += part["choices"][0]["text"]
        assert part["usage"] is None
    assert texts == ["xy", "12"] and done == "[DONE]"
    assert last["choices"] == [] and last["usage"] == body["usage"]


@pytest.mark.asyncio
async def test_text_held_back_makes_no_event_after_the_first() -> None:
    script: Script = [[chunk("a", "x")], [chunk("a", "", count=2)], [chunk("a", "ab", "stop", 3)]]
    running = generation(ScriptedVersion(script), "a")
    await running.start()
    *parts, done = await events(running)
    assert [part["choices"][0]["text"] for part in parts] == ["x", "ab"] and done == "[DONE]"


@pytest.mark.parametrize(
    "held", [[chunk("a", ""), chunk("a", "")], [chunk("a", "x"), chunk("a", "")]], ids=["all", "some"]
)
@pytest.mark.asyncio
async def test_the_first_event_of_a_chat_choice_carries_the_role(held: list[TokenChunk]) -> None:
    """Also where a stop string, or half a character, holds its text back."""
    running = generation(
        ScriptedVersion([[item] for item in held] + [[chunk("a", "yz", "stop", 3)]]), "a", is_chat=True
    )
    await running.start()
    first, *others, done = await events(running)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": held[0].text}
    assert [other["choices"][0]["delta"] for other in others] == [{"content": "yz"}] and done == "[DONE]"


@pytest.mark.asyncio
async def test_every_choice_of_a_chat_gets_its_role_once() -> None:
    script: Script = [[chunk("a", ""), chunk("b", "1")], [chunk("b", "2", "stop", 2)], [chunk("a", "y", "stop", 2)]]
    running = generation(ScriptedVersion(script), "ab", n=2, is_chat=True)
    await running.start()
    *parts, _ = await events(running)
    choices = [part["choices"][0] for part in parts]
    assert [choice["index"] for choice in choices if "role" in choice["delta"]] == [0, 1]


@pytest.mark.asyncio
async def test_the_echo_is_sent_though_the_first_text_is_held_back() -> None:
    running = generation(ScriptedVersion([[chunk("a", "")], [chunk("a", "ab", "stop", 2)]]), "a", echo="Say: ")
    await running.start()
    *parts, _ = await events(running)
    assert [part["choices"][0]["text"] for part in parts] == ["Say: ", "ab"]


@pytest.mark.asyncio
async def test_refusal_of_the_second_prompt_comes_before_any_byte() -> None:
    version = ScriptedVersion([[chunk("a", "x")], 60.0], [0.01, OverloadedError("full")])
    with pytest.raises(OverloadedError):
        await generation(version, "a", "b").start()
    assert version.num_open == 0


@pytest.mark.asyncio
async def test_failure_in_mid_stream_is_the_last_event() -> None:
    version = ScriptedVersion([[chunk("a", "x")], EngineError("boom")])
    running = generation(version, "a")
    await running.start()
    first, last = await events(running)
    assert first["choices"][0]["text"] == "x"
    assert last["error"]["message"] == "boom"
    assert version.num_open == 0


@pytest.mark.parametrize("reason", ["deadline", "abort", "error"])
@pytest.mark.asyncio
async def test_ends_that_are_errors_have_their_status(reason: str) -> None:
    version = ScriptedVersion([[chunk("a", "", reason)]])
    with pytest.raises(LongspanError):
        await generation(version, "a").start()
    running = generation(ScriptedVersion([[chunk("a", "x")], [chunk("a", "", reason, 2)]]), "a")
    await running.start()
    with pytest.raises(LongspanError):
        await running.whole()


@pytest.mark.asyncio
async def test_deadline_before_and_after_the_first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEADLINE_GRACE_S", 0.05)
    version = ScriptedVersion([60.0], [[chunk("a", "x")], 60.0])
    with pytest.raises(DeadlineExceededError):
        await generation(version, "a", timeout_s=0.02).start()
    running = generation(version, "a", timeout_s=IN_TIME_S)
    await running.start()
    assert (await events(running))[-1]["error"]["code"] == "deadline_exceeded"
    assert version.num_open == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.asyncio
async def test_the_engine_ends_what_is_late(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """It counts a deadline; a cancelled call it would count as aborted."""
    monkeypatch.setattr(module, "DEADLINE_GRACE_S", 30.0)
    ended = chunk("a", "", "deadline", 2)
    version = ScriptedVersion([[chunk("a", "x")], IN_TIME_S + 0.1, [ended]])
    running = generation(version, "a", timeout_s=IN_TIME_S)
    await running.start()
    if stream:
        assert (await events(running))[-1]["error"]["code"] == "deadline_exceeded"
    else:
        with pytest.raises(DeadlineExceededError):
            await running.whole()
    assert (version.num_open, version.num_cut) == (0, 0)


@pytest.mark.parametrize(
    "script",
    [
        [0.2, [chunk("a", "x")], 0.1, [chunk("a", "", "deadline")]],
        [0.2, [chunk("a", "x")], 0.1, [chunk("a", "y", "stop")]],
        [0.2, DeadlineExceededError("no token yet")],
    ],
    ids=["ended", "complete", "refused"],
)
@pytest.mark.asyncio
async def test_an_answer_that_begins_late_gets_its_status(monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    monkeypatch.setattr(module, "DEADLINE_GRACE_S", 30.0)
    version = ScriptedVersion(script)
    with pytest.raises(DeadlineExceededError):
        await generation(version, "a", timeout_s=0.1).start()
    assert (version.num_open, version.num_cut) == (0, 0)


@pytest.mark.asyncio
async def test_closing_early_closes_every_stream() -> None:
    version = ScriptedVersion([[chunk("a", "x")], 60.0], [[chunk("b", "y")], 60.0])
    running = generation(version, "a", "b")
    await running.start()
    assert version.num_open == 2
    await running.close()
    assert version.num_open == 0


@pytest.mark.asyncio
async def test_merge_waits_for_every_stream_to_start() -> None:
    version = ScriptedVersion([[chunk("a", "1")], [chunk("a", "2", "stop")]], [0.05, [chunk("b", "x", "stop")]])
    items = merge([version.generate(None, None), version.generate(None, None)])
    first = await anext(items)
    assert [(item.request_id, item.text) for item in first] == [("a", "1"), ("a", "2"), ("b", "x")]
    assert await anext(items, None) is None
