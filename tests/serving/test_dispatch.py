"""Choosing, holding and sending again: a router's side of a pool with scripted replicas."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, cast

import pytest

from app.config import EngineConfig, ModelSource, QueueBounds, RouterSettings
from app.engine.loading import load_engine
from app.errors import (
    DeadlineExceededError,
    EngineError,
    LongspanError,
    OverloadedError,
    ReplicaLostError,
    UnavailableError,
)
from app.protocol import EngineStats, GenerateRequest, SamplingParams, TokenChunk
from app.serving import dispatch as module
from app.serving.demand import ZeroGate
from app.serving.dispatch import Dispatcher, PromptRun
from app.serving.monitor import ReplicaReport
from app.serving.pool_client import PoolClient
from app.serving.routing import OutputEstimates, PoolLimits
from app.serving.streaming import Pacer, SequenceGroup
from tests.serving.scripted import TOKENIZER

ENGINE = EngineConfig(device="cpu", num_threads=1, cache_blocks=8, max_model_len=256)
LIMITS = PoolLimits(1000, 100, "v", max_num_seqs=2)
Play = Callable[[str | None, Sequence[GenerateRequest]], AsyncGenerator[list[TokenChunk], None]]


class Client:
    """Plays what a replica does; `sent` are the replicas asked for, in order."""

    def __init__(self, play: Play) -> None:
        self._play = play
        self.sent: list[str | None] = []
        self.requests: list[GenerateRequest] = []
        self.taken_by: str | None = None  # another than the one asked for

    async def generate(
        self, requests: Sequence[GenerateRequest], replica_id: str | None, on_taken: Callable[[str], None]
    ) -> AsyncGenerator[list[TokenChunk], None]:
        self.sent.append(replica_id)
        self.requests.extend(requests)
        is_first = True
        async for item in self._play(replica_id, requests):
            if is_first:
                on_taken(self.taken_by or replica_id or "serve's")
                is_first = False
            yield item


def chunk(name: str, text: str = "x", finish: Any = None, count: int = 1) -> TokenChunk:
    return TokenChunk(name, (1,), text=text, finish_reason=finish, num_output_tokens=count)


async def answer(_replica: str | None, requests: Sequence[GenerateRequest]) -> AsyncGenerator[list[TokenChunk], None]:
    yield [chunk(request.request_id, "1") for request in requests]
    yield [chunk(request.request_id, "2", "stop", 2) for request in requests]


def failing(on: Sequence[str], error: LongspanError, after: int = 0) -> Play:
    async def play(replica: str | None, requests: Sequence[GenerateRequest]) -> AsyncGenerator[list[TokenChunk], None]:
        index = 0
        async for item in answer(replica, requests):
            if replica in on and index == after:
                raise error
            index += 1
            yield item

    return play


async def forever(_replica: str | None, requests: Sequence[GenerateRequest]) -> AsyncGenerator[list[TokenChunk], None]:
    yield [chunk(request.request_id) for request in requests]
    await asyncio.Event().wait()


def build(play: Play = answer, *replicas: str, **settings: Any) -> tuple[Dispatcher, Client]:
    client = Client(play)
    chosen = RouterSettings(**settings)
    dispatcher = Dispatcher("short", cast(PoolClient, client), ZeroGate("short"), lambda: chosen, OutputEstimates(50.0))
    report(dispatcher, *replicas)
    return dispatcher, client


def report(dispatcher: Dispatcher, *replicas: str, **stats: Any) -> None:
    dispatcher.update([(0.0, ReplicaReport("short", name, LIMITS, EngineStats(**stats))) for name in replicas])


def prompt(*names: str, tokens: Sequence[int] = range(10), streamed: bool = True) -> PromptRun:
    requests = tuple(GenerateRequest(name, tuple(tokens), SamplingParams()) for name in names)
    return PromptRun("short", requests, "short", is_streamed=streamed)


async def texts(dispatcher: Dispatcher, run: PromptRun, deadline_s: float | None = None) -> list[str]:
    return [" ".join(one.text for one in item) async for item in dispatcher.generate(run, deadline_s)]


LOST = ReplicaLostError("gone")


@pytest.mark.asyncio
async def test_a_burst_with_equal_figures_spreads() -> None:
    dispatcher, client = build(forever, "a", "b", "c")
    streams = [dispatcher.generate(prompt(str(index), tokens=[index] * 10), None) for index in range(30)]
    for stream in streams:
        await anext(stream)
    assert Counter(client.sent) == {"a": 10, "b": 10, "c": 10}
    assert dispatcher.load().running_seqs == 30
    for stream in streams:
        await stream.aclose()
    assert dispatcher.load().is_idle


@pytest.mark.asyncio
async def test_an_idle_pool_that_was_just_given_a_request_is_idle_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher, _ = build(answer, "a")
    assert dispatcher.load().is_idle
    monkeypatch.setattr(module, "EXPECTED_S", 60.0)
    dispatcher.expect()
    assert not dispatcher.load().is_idle
    monkeypatch.setattr(module, "EXPECTED_S", 0.0)
    dispatcher.expect()
    assert dispatcher.load().is_idle


@pytest.mark.asyncio
async def test_turns_of_a_conversation_stay_together_and_only_what_is_new_waits() -> None:
    dispatcher, client = build(answer, "a", "b", "c")
    for length in range(100, 900, 100):
        await texts(dispatcher, prompt(str(length), tokens=range(length)))
    assert len(set(client.sent)) == 1
    gate = asyncio.Event()

    async def slow(replica: str | None, requests: Sequence[GenerateRequest]) -> AsyncGenerator[list[TokenChunk], None]:
        await gate.wait()
        async for item in answer(replica, requests):
            yield item

    client._play = slow
    task = asyncio.create_task(texts(dispatcher, prompt("next", tokens=range(900))))
    await asyncio.sleep(0.01)
    assert dispatcher.load().waiting_prefill_tokens == 900 - 781
    gate.set()
    await task
    assert len(set(client.sent)) == 1


@pytest.mark.asyncio
async def test_what_is_lost_before_its_first_token_is_sent_to_another_replica() -> None:
    dispatcher, client = build(failing(["a"], LOST), "a")
    report(dispatcher, "a", "b")
    for _ in range(20):  # until chance has picked a, which is then avoided
        assert await texts(dispatcher, prompt("x")) == ["1", "2"]
    assert Counter(client.sent)["a"] == 1 and client.sent[client.sent.index("a") + 1] == "b"
    assert dispatcher.traffic.router_retries == 1 and dispatcher.traffic.router_requests_lost == 0


@pytest.mark.asyncio
async def test_what_has_begun_to_stream_is_never_sent_again() -> None:
    dispatcher, client = build(failing(["a", "b"], LOST, after=1), "a", "b")
    stream = dispatcher.generate(prompt("x"), None)
    assert [one.text for one in await anext(stream)] == ["1"]
    with pytest.raises(UnavailableError):
        await anext(stream)
    assert len(client.sent) == 1 and dispatcher.traffic.router_requests_lost == 1
    assert dispatcher.load().is_idle


@pytest.mark.asyncio
async def test_an_answer_that_is_not_streamed_is_made_once_more() -> None:
    dispatcher, client = build(failing(["a"], LOST, after=1), "a")
    report(dispatcher, "a", "b")
    for _ in range(20):
        assert await texts(dispatcher, prompt("x", "y", streamed=False)) == ["12 12"]
    assert Counter(client.sent)["a"] == 1 and dispatcher.traffic.router_retries == 2


@pytest.mark.asyncio
async def test_what_is_sent_again_has_another_id_on_the_way() -> None:
    """What the lost replica's channel still carries must not pass for the next one's tokens."""
    dispatcher, client = build(failing(["a", "b"], LOST, after=1), "a", "b")
    task = asyncio.create_task(anext(dispatcher.generate(prompt("x", streamed=False), None)))
    while len(client.sent) < 2:
        await asyncio.sleep(0.001)
    report(dispatcher, "c")
    assert [one.request_id for one in await task] == ["x"]
    assert len(client.sent) == len({request.request_id for request in client.requests}) == 3


@pytest.mark.asyncio
async def test_an_answer_that_is_not_streamed_is_the_same_though_its_engine_died_half_way() -> None:
    engines = {name: load_engine(ModelSource(), ENGINE) for name in "ab"}

    async def play(replica: str | None, requests: Sequence[GenerateRequest]) -> AsyncGenerator[list[TokenChunk], None]:
        num_tokens = 0
        async with aclosing(SequenceGroup(requests, TOKENIZER, Pacer()).run(engines[str(replica)], lambda: None)) as it:
            async for item in it:
                num_tokens += sum(len(one.token_ids) for one in item.chunks)
                if replica == "a" and num_tokens >= 4:
                    engines["a"].fail("rank 1 was lost")
                yield list(item.chunks)

    def seeded() -> PromptRun:
        sampling = SamplingParams(max_tokens=200, temperature=0.9, seed=7, ignore_eos=True)  # far from done
        requests = tuple(GenerateRequest(name, tuple(range(10, 30)), sampling, cache_salt=name) for name in "xy")
        return PromptRun("short", requests, "short", is_streamed=False)

    dispatcher, client = build(play, "a")
    for engine in engines.values():
        engine.start()
    task = asyncio.create_task(anext(dispatcher.generate(seeded(), asyncio.get_running_loop().time() + 60.0)))
    while not dispatcher.traffic.router_retries:
        await asyncio.sleep(0.01)
    report(dispatcher, "b")
    remade = await task
    (undisturbed,) = [item async for item in dispatcher.generate(seeded(), None)]
    for engine in engines.values():
        engine.stop()
    assert client.sent == ["a", "b", "b"]
    assert [one.num_output_tokens for one in remade] == [len(one.token_ids) for one in remade] == [200, 200]
    assert [(one.request_id, one.token_ids, one.text) for one in remade] == [
        (one.request_id, one.token_ids, one.text) for one in undisturbed
    ]
    assert (dispatcher.traffic.router_retries, dispatcher.traffic.router_requests_lost) == (2, 0)


@pytest.mark.asyncio
async def test_an_answer_is_not_made_again_after_its_deadline() -> None:
    dispatcher, client = build(failing(["a"], LOST, after=1), "a")
    with pytest.raises(DeadlineExceededError):
        await texts(dispatcher, prompt("x", streamed=False), asyncio.get_running_loop().time() + 0.2)
    assert client.sent == ["a"] and dispatcher.traffic.router_requests_held == 0


@pytest.mark.asyncio
async def test_retries_are_bounded() -> None:
    dispatcher, client = build(failing(list("abcdef"), LOST), *"abcdef", max_retries=3)
    with pytest.raises(UnavailableError):
        await texts(dispatcher, prompt("x"))
    assert len(client.sent) == len(set(client.sent)) == 4
    assert (dispatcher.traffic.router_retries, dispatcher.traffic.router_requests_lost) == (3, 1)


@pytest.mark.parametrize("error", [OverloadedError("full"), EngineError("a bug"), DeadlineExceededError("late")])
@pytest.mark.asyncio
async def test_what_another_replica_would_not_mend_is_not_sent_again(error: LongspanError) -> None:
    dispatcher, client = build(failing(["a", "b"], error), "a", "b")
    with pytest.raises(type(error)):
        await texts(dispatcher, prompt("x"))
    assert len(client.sent) == 1


@pytest.mark.asyncio
async def test_a_retry_is_held_until_the_pool_has_a_replica_again() -> None:
    dispatcher, client = build(failing(["a"], LOST), "a")
    task = asyncio.create_task(texts(dispatcher, prompt("x", "y")))
    for _ in range(3):
        await asyncio.sleep(0.01)
        report(dispatcher, "a")  # its last report is still around
    assert dispatcher.traffic.router_requests_held == 2 and not task.done()
    report(dispatcher, "b")
    assert await task == ["1 1", "2 2"]
    assert client.sent == ["a", "b"] and dispatcher.traffic.router_requests_held == 0
    assert dispatcher.traffic.router_holds_ended == {"replica": 2}


@pytest.mark.asyncio
async def test_holding_ends_with_the_deadline_or_the_bound() -> None:
    loop = asyncio.get_running_loop()
    dispatcher, client = build(answer, max_hold_s=0.05, short=QueueBounds(max_waiting_seqs=1))
    held = asyncio.create_task(texts(dispatcher, prompt("x")))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await texts(dispatcher, prompt("y"))
    with pytest.raises(UnavailableError) as caught:
        await held
    assert caught.value.retry_after_s >= 1.0
    with pytest.raises(DeadlineExceededError):
        await texts(dispatcher, prompt("x"), loop.time() + 0.01)
    assert client.sent == [] and dispatcher.traffic.router_requests_held == 0
    assert dispatcher.traffic.router_requests_rejected == 1 and dispatcher.traffic.router_tokens_rejected == 10
    left = asyncio.create_task(texts(dispatcher, prompt("x", "y")))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    assert dispatcher.traffic.router_holds_ended == {"max_hold": 1, "deadline": 1, "client_left": 2}


@pytest.mark.asyncio
async def test_while_the_monitor_is_silent_serve_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher, client = build()
    monkeypatch.setattr(module, "INFORMED_S", 0.0)
    assert await texts(dispatcher, prompt("x")) == ["1", "2"]
    assert client.sent == [None]


@pytest.mark.asyncio
async def test_what_is_held_when_the_monitor_falls_silent_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECHECK_S", 0.01)
    dispatcher, client = build()
    task = asyncio.create_task(texts(dispatcher, prompt("x")))
    await asyncio.sleep(0.05)
    assert client.sent == []
    monkeypatch.setattr(module, "INFORMED_S", 0.0)
    assert await task == ["1", "2"] and client.sent == [None]
    assert dispatcher.traffic.router_holds_ended == {"silent_monitor": 1}


@pytest.mark.asyncio
async def test_a_replica_that_serve_does_not_send_to_is_left_out() -> None:
    dispatcher, client = build(answer, "draining")
    client.taken_by = "b"
    await texts(dispatcher, prompt("x"))
    report(dispatcher, "draining", "b")
    for index in range(10):
        await texts(dispatcher, prompt(str(index), tokens=[index]))
    assert client.sent == ["draining"] + ["b"] * 10


@pytest.mark.asyncio
async def test_each_attempt_gets_the_time_that_is_left() -> None:
    dispatcher, client = build(failing(["a"], LOST), "a")
    deadline_s = asyncio.get_running_loop().time() + 60.0
    task = asyncio.create_task(texts(dispatcher, prompt("x"), deadline_s))
    await asyncio.sleep(0.2)
    report(dispatcher, "b")
    await task
    first, second = (request.timeout_s or 0.0 for request in client.requests)
    assert 30.0 < second < first - 0.15 < 60.0


@pytest.mark.asyncio
async def test_a_drained_queue_takes_requests_again_at_once() -> None:
    bounds = QueueBounds(max_ttft_s=1.0)
    gate = asyncio.Event()

    async def slow(replica: str | None, requests: Sequence[GenerateRequest]) -> AsyncGenerator[list[TokenChunk], None]:
        await gate.wait()
        async for item in answer(replica, requests):
            yield item

    dispatcher, _ = build(slow, "a", short=bounds)
    report(dispatcher, "a", prefill_step_tokens=1000, prefill_step_seconds=1.0)
    tasks = [asyncio.create_task(texts(dispatcher, prompt(str(index), tokens=[index] * 400))) for index in range(2)]
    await asyncio.sleep(0.01)
    for _ in range(3):
        with pytest.raises(OverloadedError) as caught:
            await texts(dispatcher, prompt("late", tokens=[7] * 900))
        assert caught.value.retry_after_s == 1.0
    gate.set()
    await asyncio.gather(*tasks)
    assert await texts(dispatcher, prompt("late", tokens=[7] * 900)) == ["1", "2"]


@pytest.mark.asyncio
async def test_the_prompts_of_one_http_request_go_in_together_or_not_at_all() -> None:
    gate = asyncio.Event()

    async def slow(replica: str | None, requests: Sequence[GenerateRequest]) -> AsyncGenerator[list[TokenChunk], None]:
        await gate.wait()
        async for item in answer(replica, requests):
            yield item

    dispatcher, client = build(slow, "a", short=QueueBounds(max_ttft_s=1.0))
    report(dispatcher, "a", prefill_step_tokens=1000, prefill_step_seconds=1.0)
    runs = PromptRun.together([prompt(str(index), tokens=[index] * 400) for index in range(4)])
    assert len(runs[0].followers or ()) == 3 and [run.followers for run in runs[1:]] == [None] * 3
    # On an idle pool, though the last of them waits for longer than the bound.
    held = [asyncio.create_task(texts(dispatcher, run)) for run in runs]
    await asyncio.sleep(0)
    assert dispatcher.load().waiting_prefill_tokens == 1600
    late, _ = PromptRun.together([prompt("late"), prompt("later")])
    with pytest.raises(OverloadedError):
        await texts(dispatcher, late)
    gate.set()
    assert await asyncio.gather(*held) == [["1", "2"]] * 4
    assert len(client.sent) == 4 and dispatcher.load().is_idle
    assert dispatcher.traffic.router_requests_rejected == 2 and dispatcher.traffic.router_tokens_rejected == 20


@pytest.mark.asyncio
async def test_the_bucket_learns_how_much_is_generated() -> None:
    dispatcher, _ = build(answer, "a")
    for index in range(400):
        await texts(dispatcher, prompt(str(index)))
    assert dispatcher._estimates.expected_tokens("short") < 3.0
    assert dispatcher._estimates.expected_tokens("long") == 50.0
