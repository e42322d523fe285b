"""The engine on the embedded model: batching, chunking, prefix hits and preemption never change a token."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from app.config import EngineConfig, ModelSource
from app.engine.batch import Batch
from app.engine.engine import Engine
from app.engine.loading import load_engine
from app.errors import ContextLengthError, DeadlineExceededError, EngineError, InvalidRequestError, ReplicaLostError
from app.protocol import GenerateRequest, SamplingParams, TokenChunk

Prompt = tuple[int, ...]


def make_engine(**config: object) -> Engine:
    return load_engine(ModelSource(), EngineConfig(device="cpu", num_threads=1, max_chunk_tokens=96, **config))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Never started: the tests step it."""
    return make_engine(cache_blocks=64)


def prompt_of(length: int, start: int = 11) -> Prompt:
    return tuple(6 + (start * 31 + 97 * index) % 8000 for index in range(length))


def run(engine: Engine, requests: list[GenerateRequest]) -> dict[str, list[TokenChunk]]:
    """Step until everything has ended; the books are checked after every step."""
    for request in requests:
        engine.add(request)
    chunks: dict[str, list[TokenChunk]] = {request.request_id: [] for request in requests}
    while engine.has_work:
        for chunk in engine.step():
            chunks[chunk.request_id].append(chunk)
        engine.check_integrity()
    return chunks


def tokens_of(chunks: list[TokenChunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def greedy(name: str, prompt: Prompt, max_tokens: int = 24, **sampling: object) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return GenerateRequest(name, prompt, params, cache_salt=name)


LENGTHS = (1, 2, 63, 64, 65, 95, 96, 97, 200)


def sampled_requests(salt: str) -> list[GenerateRequest]:
    """Half greedy, half with a seed, at lengths around the block and chunk borders; logprobs asked for."""
    return [
        GenerateRequest(
            f"{salt}-{length}",
            prompt_of(length, start=length),
            SamplingParams(
                max_tokens=12,
                ignore_eos=True,
                logprobs=2,
                seed=length,
                temperature=0.9 if length % 2 else 0.0,
                top_p=0.95,
            ),
            cache_salt=salt,
        )
        for length in LENGTHS
    ]


def test_a_request_has_the_same_bits_alone_batched_and_in_other_chunks(engine: Engine) -> None:
    together = run(engine, sampled_requests("together"))
    other_chunks = run(make_engine(cache_blocks=64, max_batched_tokens=40), sampled_requests("together"))
    for request in sampled_requests("alone"):
        alone = run(engine, [request])[request.request_id]
        name = request.request_id.replace("alone", "together")
        for others in (together[name], other_chunks[name]):
            assert tokens_of(others) == tokens_of(alone)
            assert [chunk.logprobs for chunk in others] == [chunk.logprobs for chunk in alone]


def test_a_prefix_hit_changes_no_bit(engine: Engine) -> None:
    requests = [replace(greedy(name, prompt_of(150), 8, logprobs=0), cache_salt="hit") for name in ("first", "second")]
    first, second = (run(engine, [request])[request.request_id] for request in requests)
    assert (first[0].num_cached_tokens, second[0].num_cached_tokens) == (0, 128)
    assert [chunk.logprobs for chunk in first] == [chunk.logprobs for chunk in second]


def test_a_cache_for_two_of_six_sequences_serves_all_six_unchanged(engine: Engine) -> None:
    requests = [greedy(f"r{index}", prompt_of(100, start=index), max_tokens=60) for index in range(6)]
    alone = {request.request_id: tokens_of(run(engine, [request])[request.request_id]) for request in requests}
    small = make_engine(cache_blocks=5)  # each sequence starts with two blocks and grows to three
    together = run(small, requests)
    assert {name: tokens_of(chunks) for name, chunks in together.items()} == alone
    assert small.stats().num_preemptions > 0
    assert small.stats().num_free_blocks == 5


def test_a_seed_decides_and_no_seed_varies(engine: Engine) -> None:
    sample: Callable[[str, int | None], list[int]] = lambda name, seed: tokens_of(  # noqa: E731
        run(engine, [greedy(name, prompt_of(20), temperature=1.5, seed=seed)])[name]
    )
    assert sample("a", 5) == sample("b", 5)
    assert sample("c", 6) != sample("a", 5)
    assert sample("d", None) != sample("e", None)


def test_controls_reach_the_logits(engine: Engine) -> None:
    def first(**sampling: object) -> int:
        return tokens_of(run(engine, [greedy("x", prompt_of(30), 1, **sampling)])["x"])[0]

    best = first()
    assert first(logit_bias={best: -100.0}) != best
    assert first(logit_bias={77: 100.0}) == 77
    repeated = tokens_of(run(engine, [greedy("y", prompt_of(30), 24, logit_bias={77: 30.0})])["y"])
    penalised = tokens_of(
        run(engine, [greedy("z", prompt_of(30), 24, logit_bias={77: 30.0}, frequency_penalty=2.0)])["z"]
    )
    assert penalised.count(77) < repeated.count(77)


def test_min_tokens_holds_back_the_end(engine: Engine) -> None:
    request = GenerateRequest(
        "m", prompt_of(9), SamplingParams(max_tokens=9, min_tokens=5, temperature=0.0, logit_bias={1: 100.0})
    )
    chunks = run(engine, [request])["m"]
    assert (len(tokens_of(chunks)), chunks[-1].finish_reason) == (6, "stop")


def test_logprobs_are_those_of_the_model(engine: Engine) -> None:
    chunk = run(engine, [greedy("l", prompt_of(12), 1, logprobs=3)])["l"][0]
    assert chunk.logprobs is not None
    (logprob,) = chunk.logprobs
    assert logprob.top[0] == (logprob.token_id, logprob.logprob)
    assert [value for _, value in logprob.top] == sorted((value for _, value in logprob.top), reverse=True)
    assert logprob.logprob < 0


# ---- the running engine ----


@pytest.fixture(scope="module")
def started() -> Iterator[Engine]:
    engine = make_engine(cache_blocks=1024, max_num_seqs=64)
    engine.start()
    yield engine
    engine.stop()


async def collect(engine: Engine, request: GenerateRequest) -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(request)]


def test_streams_end_with_a_reason_and_count_their_tokens(started: Engine) -> None:
    async def go() -> list[list[TokenChunk]]:
        return await asyncio.gather(*(collect(started, greedy(f"s{i}", prompt_of(40, i), 10)) for i in range(5)))

    for chunks in asyncio.run(go()):
        counts = list(itertools.accumulate(len(chunk.token_ids) for chunk in chunks))
        assert counts == [chunk.num_output_tokens for chunk in chunks] and (counts[0], counts[-1]) == (1, 10)
        assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert chunks[-1].num_prompt_tokens == 40


def test_cancelled_streams_free_their_blocks_without_new_traffic(started: Engine) -> None:
    async def go() -> None:
        free = started.stats().num_free_blocks
        tasks = [asyncio.ensure_future(collect(started, greedy(f"c{i}", prompt_of(100, i), 1000))) for i in range(50)]
        while started.stats().num_requests_running < 50:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        stats = started.stats()
        assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)
        assert stats.num_free_blocks == free

    asyncio.run(go())
    started.check_integrity()


def test_closing_a_stream_early_aborts_it(started: Engine) -> None:
    async def go() -> None:
        stream = started.generate(greedy("early", prompt_of(10), 500))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        assert not started.has_work

    asyncio.run(go())


def test_a_deadline_ends_a_stream_that_has_begun(started: Engine) -> None:
    """Its first token comes within the second on a busy machine too, its last one on no machine."""
    request = GenerateRequest("d", prompt_of(10), SamplingParams(max_tokens=16_000, ignore_eos=True), timeout_s=1.5)
    chunks = asyncio.run(collect(started, request))
    assert chunks[-1].finish_reason == "deadline" and 0 < chunks[-1].num_output_tokens < 16_000


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (greedy("bad", ()), InvalidRequestError),
        (greedy("bad", (9000,)), InvalidRequestError),
        (greedy("bad", prompt_of(16384)), ContextLengthError),
    ],
    ids=["empty", "out of vocabulary", "too long"],
)
def test_a_refused_request_changes_nothing(started: Engine, request_: GenerateRequest, error: type[Exception]) -> None:
    asyncio.run(collect(started, greedy("before", prompt_of(3), 2)))  # a step for aborted requests is over then
    before = started.stats()
    with pytest.raises(error):
        asyncio.run(collect(started, request_))
    assert started.stats() == before
    assert len(tokens_of(asyncio.run(collect(started, greedy("good", prompt_of(3), 2))))) == 2


def test_an_abort_while_a_step_is_being_prepared_harms_nobody(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens_of(run(engine, [greedy("y", prompt_of(20), 12)])["y"])
    forward, calls = engine._runner.forward, [0]

    def aborting(*args: object) -> object:
        calls[0] += 1
        if calls[0] == 3:
            engine.abort("x")
        return forward(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(engine._runner, "forward", aborting)
    chunks = run(engine, [greedy("y", prompt_of(20), 12), greedy("x", prompt_of(30, 5), 12)])
    assert tokens_of(chunks["y"]) == expected
    assert len(tokens_of(chunks["x"])) == 2


def test_a_deadline_and_a_failing_step_at_once_end_both_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(cache_blocks=8)

    def broken(*_: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine._runner, "forward", broken)

    async def go() -> list[object]:
        late = GenerateRequest("late", prompt_of(5), SamplingParams(), timeout_s=0.0)
        streams = [collect(engine, late), collect(engine, greedy("other", prompt_of(5)))]
        tasks = [asyncio.ensure_future(stream) for stream in streams]
        await asyncio.sleep(0)
        engine.start()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=30)

    outcomes = asyncio.run(go())
    assert [type(outcome) for outcome in outcomes] == [DeadlineExceededError, EngineError]
    engine.stop()


def test_a_failed_commit_leaves_no_stream_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(cache_blocks=8)
    commit = engine._scheduler.commit

    def losing(*args: object) -> None:
        commit(*args)  # type: ignore[arg-type]
        raise RuntimeError("lost after the books were closed")

    monkeypatch.setattr(engine._scheduler, "commit", losing)
    engine.start()
    with pytest.raises(EngineError):
        asyncio.run(asyncio.wait_for(collect(engine, greedy("one", prompt_of(5), 1)), timeout=30))
    engine.stop()


@pytest.mark.parametrize(
    "limits",
    [{"max_waiting_seqs": 1}, {"cache_blocks": 1}, {"max_model_len": 2}, {"max_num_seqs": 1, "max_model_len": 3}],
)
def test_the_self_test_fits_small_limits(limits: dict[str, int]) -> None:
    engine = make_engine(**limits)
    assert tokens_of(run(engine, [greedy("x", (7,), 1)])["x"])


def test_failing_steps_end_their_streams_and_then_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(cache_blocks=8)
    engine.start()

    def broken(*_: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine._runner, "forward", broken)
    for attempt in range(3):
        with pytest.raises(EngineError, match="RuntimeError"):
            asyncio.run(collect(engine, greedy(f"f{attempt}", prompt_of(5))))
    thread = engine._thread
    assert thread is not None
    thread.join(timeout=60)
    with pytest.raises(EngineError, match="3 engine steps in a row failed"):
        engine.check_health()
    with pytest.raises(ReplicaLostError):
        asyncio.run(collect(engine, greedy("after", prompt_of(5))))
    engine.check_integrity()
    engine.stop()


def test_a_dead_engine_ends_its_streams_while_a_step_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(cache_blocks=8)
    hangs, released = threading.Event(), threading.Event()
    forward = engine._runner.forward
    steps = 0

    def hanging(batch: Batch, *rest: object) -> object:
        nonlocal steps
        steps += 1
        if steps == 3:
            hangs.set()
            released.wait(30)
        return forward(batch, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(engine._runner, "forward", hanging)

    async def go() -> list[object]:
        streams = [asyncio.ensure_future(collect(engine, greedy("streams", prompt_of(5), 100)))]
        engine.start()
        await asyncio.to_thread(hangs.wait, 30)
        streams.append(asyncio.ensure_future(collect(engine, greedy("waits", prompt_of(5)))))
        await asyncio.sleep(0)
        engine.fail("rank 1 is gone")
        return await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), timeout=30)

    outcomes = asyncio.run(go())
    released.set()
    # Whoever has passed nothing on yet may send the request to another replica.
    assert [(type(outcome), str(outcome)) for outcome in outcomes] == [(ReplicaLostError, "rank 1 is gone")] * 2
    with pytest.raises(EngineError, match="rank 1 is gone"):
        engine.check_health()
    engine.stop()
    engine.check_integrity()


def test_two_reasons_at_once_leave_every_stream_fit_for_another_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own thread and who watches the ranks both notice a loss; the second is quicker to hand it on."""
    engine = make_engine(cache_blocks=8)
    deliver, num_calls = engine._deliver, 0

    def overtaken(chunks: list[TokenChunk]) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            engine.fail("rank 1 was lost")
        deliver(chunks)

    async def go() -> None:
        stream = engine.generate(greedy("has tokens", prompt_of(5), 100))
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        deliver(engine.step())
        assert (await first).num_output_tokens == 1
        monkeypatch.setattr(engine, "_deliver", overtaken)
        engine.fail("a collective failed")
        with pytest.raises(ReplicaLostError, match="a collective failed"):
            await anext(stream)

    asyncio.run(go())
    assert num_calls == 2
