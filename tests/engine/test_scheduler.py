"""The scheduler alone: no model, no tensors; sampled tokens are made up."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from app.cache.layout import CacheLayout
from app.engine import scheduler as scheduler_module
from app.engine.batch import Batch
from app.engine.limits import Limits
from app.engine.prompt_cost import PromptCost
from app.engine.scheduler import Scheduler
from app.errors import ContextLengthError, InvalidRequestError, OverloadedError
from app.protocol import GenerateRequest, SamplingParams, TokenChunk

BLOCK = 4


def make_scheduler(num_blocks: int = 64, **limits: float) -> Scheduler:
    defaults = Limits(
        max_model_len=200, max_num_seqs=8, max_batched_tokens=32, max_chunk_tokens=8, max_waiting_seqs=100,
        chunk_steps=(1,), max_step_s=1e9, prompt_cost=PromptCost(1e12, 0.0),
        max_passed_over_s=1e9, prefix_caching=True, vocab_size=50,
        eos_token_ids=frozenset({1}),
    )  # fmt: skip
    layout = CacheLayout(num_layers=1, dim=2, dtype=torch.float32, block_size=BLOCK)
    return Scheduler(replace(defaults, **limits), layout, num_blocks, version="v")  # type: ignore[arg-type]


def request(
    name: str, num_tokens: int = 5, *, first: int = 2, priority: int = 0, **sampling: object
) -> GenerateRequest:
    prompt = tuple(2 + (first + index) % 48 for index in range(num_tokens))
    return GenerateRequest(name, prompt, SamplingParams(**{"max_tokens": 4, **sampling}), priority=priority)  # type: ignore[arg-type]


def run_step(scheduler: Scheduler, token_id: int = 7) -> tuple[Batch | None, list[TokenChunk]]:
    batch = scheduler.schedule()
    scheduler.check_integrity()
    if batch is None:
        return None, []
    count = len(batch.samples)
    chunks = scheduler.commit(batch, [token_id] * count, [None] * count)
    scheduler.check_integrity()
    return batch, chunks


def work_of(batch: Batch | None) -> dict[str, int]:
    assert batch is not None
    return {seq.request_id: count for seq, count in zip(batch.sequences, batch.num_new_tokens, strict=True)}


def test_a_prompt_is_computed_in_chunks_then_decodes() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 19))
    assert [work_of(run_step(scheduler)[0])["a"] for _ in range(5)] == [8, 8, 3, 1, 1]


def test_decodes_come_first_in_the_batch_and_share_the_step_with_prefills() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("long", 30, first=20))
    run_step(scheduler)
    scheduler.add(request("short", 3))
    run_step(scheduler)
    batch, _ = run_step(scheduler)
    assert list(work_of(batch).items()) == [("short", 1), ("long", 8)]


def test_the_step_budget_bounds_all_sequences_together() -> None:
    scheduler = make_scheduler(max_batched_tokens=10)
    for index in range(4):
        scheduler.add(request(f"r{index}", 9, first=10 * index))
    while scheduler.has_work:
        batch, _ = run_step(scheduler)
        assert batch is not None and batch.num_tokens <= 10


def test_prompts_share_a_step_and_the_shortest_needs_the_least() -> None:
    scheduler = make_scheduler(max_batched_tokens=12, max_chunk_tokens=12)
    scheduler.add(request("long", 40, first=20))
    assert work_of(run_step(scheduler)[0]) == {"long": 12}, "alone, a prompt has the whole step"
    scheduler.add(request("short", 5))
    assert work_of(run_step(scheduler)[0]) == {"long": 7, "short": 5}
    assert work_of(run_step(scheduler)[0]) == {"short": 1, "long": 11}


def test_prompts_of_one_length_are_computed_one_after_the_other() -> None:
    scheduler = make_scheduler(num_blocks=64, max_batched_tokens=12, max_chunk_tokens=12, prefix_caching=False)
    for name in ("a", "b", "c"):
        scheduler.add(request(name, 20))
    steps = [work_of(run_step(scheduler)[0]) for _ in range(4)]
    assert steps[0] == {"a": 12}
    assert steps[1] == {"a": 8, "b": 4}
    assert steps[2] == {"a": 1, "b": 11}
    assert steps[3] == {"a": 1, "b": 5, "c": 6}


def test_chunks_are_cut_to_whole_rounds_but_for_the_last() -> None:
    scheduler = make_scheduler(num_blocks=64, max_batched_tokens=30, max_chunk_tokens=30, chunk_steps=(8,))
    scheduler.add(request("long", 60, first=3))
    scheduler.add(request("short", 5, first=20))
    assert work_of(run_step(scheduler)[0]) == {"long": 24}
    assert work_of(run_step(scheduler)[0]) == {"long": 24, "short": 5}
    assert work_of(run_step(scheduler)[0]) == {"short": 1, "long": 12}


def test_long_chunks_are_cut_to_the_largest_round_that_they_reach() -> None:
    scheduler = make_scheduler(num_blocks=64, max_batched_tokens=30, max_chunk_tokens=30, chunk_steps=(8, 20))
    scheduler.add(request("long", 70, first=3))
    scheduler.add(request("short", 5, first=20))
    assert [work_of(run_step(scheduler)[0])["long"] for _ in range(4)] == [20, 20, 20, 10]


def test_steps_are_longer_where_many_wait() -> None:
    limits = {"max_batched_tokens": 2000, "max_chunk_tokens": 2000, "max_model_len": 6000, "max_num_seqs": 2}
    scheduler = make_scheduler(num_blocks=9000, max_step_s=0.2, prefix_caching=False, **limits)
    for index in range(8):
        scheduler.add(request(f"r{index}", 3000, first=index, max_tokens=20))
    for _ in range(6):
        batch, _ = run_step(scheduler)
        assert batch is not None
        scheduler.record_step_time(batch, 0.001 * batch.num_tokens)
    assert batch.num_tokens == pytest.approx(400, abs=40), "twice what fits 0.2 s"


def test_steps_are_shortened_while_others_wait_for_them(clock: list[float]) -> None:
    limits = {"max_batched_tokens": 2000, "max_chunk_tokens": 2000, "max_model_len": 6000}
    scheduler = make_scheduler(num_blocks=2000, max_step_s=0.1, **limits)

    def timed_step(s_per_token: float) -> dict[str, int]:
        batch, _ = run_step(scheduler)
        assert batch is not None
        scheduler.record_step_time(batch, s_per_token * batch.num_tokens)
        return work_of(batch)

    scheduler.add(request("talking", 2, max_tokens=100))
    timed_step(0.001)
    scheduler.add(request("long", 5900, max_tokens=100))
    counts = [timed_step(0.001)["long"] for _ in range(6)]
    assert counts[0] == 1999, "nothing is known yet"
    assert max(counts[1:]) <= 125 and min(counts[1:]) >= 80, "100 tokens fit a tenth of a second"
    assert all(count <= 2000 // 16 for count in [timed_step(0.01)["long"] for _ in range(4)][1:]), (
        "never below the least"
    )
    scheduler.abort("talking")
    assert timed_step(0.001)["long"] < 200, "others may come again soon"
    clock[0] += scheduler_module.SHARED_WINDOW_S
    assert timed_step(0.001)["long"] > 1000, "alone again"


def test_finish_reasons() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("eos"))
    assert run_step(scheduler, token_id=1)[1][0].finish_reason == "stop"
    scheduler.add(request("ignore", ignore_eos=True, max_tokens=2))
    assert [run_step(scheduler, token_id=1)[1][0].finish_reason for _ in range(2)] == [None, "length"]
    scheduler.add(request("stop-id", stop_token_ids=(9,)))
    last = run_step(scheduler, token_id=9)[1][0]
    assert (last.finish_reason, last.stop_reason) == ("stop", 9)
    scheduler.add(request("deadline"))
    assert scheduler.expire(now=1e18) == []
    scheduler.abort("deadline")
    scheduler.add(GenerateRequest("late", (2, 3), SamplingParams(), timeout_s=0.001))
    assert [chunk.finish_reason for chunk in scheduler.expire(now=1e18)] == ["deadline"]
    assert not scheduler.has_work and scheduler.pool.num_free == scheduler.pool.num_blocks


def test_a_prefix_is_shared_and_its_last_token_is_still_computed() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 16, max_tokens=1))
    while scheduler.has_work:
        run_step(scheduler)
    scheduler.add(request("b", 16))
    batch, chunks = run_step(scheduler)
    assert work_of(batch) == {"b": 4}, "15 tokens may come from the cache, 12 of them in full blocks"
    assert chunks[0].num_cached_tokens == 12


def test_sequences_that_arrive_together_share_the_prefix_that_one_of_them_computes() -> None:
    scheduler = make_scheduler(num_blocks=64)
    for index in range(5):
        scheduler.add(request(f"r{index}", 17, max_tokens=1))
    computed = 0
    while scheduler.has_work:
        batch, _ = run_step(scheduler)
        computed += batch.num_tokens if batch else 0
    assert computed == 17 + 4 * 1


def test_another_salt_shares_nothing() -> None:
    scheduler = make_scheduler()
    for salt in ("x", "y"):
        scheduler.add(GenerateRequest(salt, tuple(range(2, 12)), SamplingParams(max_tokens=1), cache_salt=salt))
        while scheduler.has_work:
            run_step(scheduler)
    assert scheduler.snapshot().prefix_cache_hits == 0


def test_the_youngest_is_preempted_and_returns_before_new_arrivals() -> None:
    scheduler = make_scheduler(num_blocks=8)
    scheduler.add(request("old", 15, first=1, max_tokens=10))
    scheduler.add(request("young", 11, first=20, max_tokens=10))
    while not scheduler.snapshot().num_preemptions:
        run_step(scheduler)
    scheduler.add(request("new", 3, first=40, max_tokens=25))
    assert work_of(scheduler.schedule()).keys() == {"old"}, "nobody overtakes the preempted sequence"
    order = finish_order(scheduler)
    assert order == ["old", "young", "new"]


def test_waiting_counts_from_the_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(scheduler_module.time, "monotonic", lambda: clock[0])
    scheduler = make_scheduler(num_blocks=8)
    scheduler.add(request("old", 15, first=1, max_tokens=10))
    scheduler.add(request("young", 11, first=20, max_tokens=10))
    while not scheduler.snapshot().num_preemptions:
        clock[0] += 7.0
        run_step(scheduler)
    assert scheduler.snapshot().oldest_waiting_s == 0.0


def finish_order(scheduler: Scheduler) -> list[str]:
    order = []
    for _ in range(1000):
        if not scheduler.has_work:
            return order
        order += [chunk.request_id for chunk in run_step(scheduler)[1] if chunk.finish_reason]
    raise AssertionError(f"still working after 1000 steps: {scheduler.request_ids}")


def test_priority_orders_the_queue() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for name, priority in (("late", 5), ("soon", 0), ("first", -1)):
        scheduler.add(request(name, priority=priority, max_tokens=1))
    assert finish_order(scheduler) == ["first", "soon", "late"]


def steps_until_first_token(scheduler: Scheduler, name: str, arrivals: Callable[[int], None]) -> int:
    """How many steps it takes `name`, while `arrivals` adds others before each."""
    for step in range(2000):
        arrivals(step)
        if any(chunk.request_id == name for chunk in run_step(scheduler)[1]):
            return step
    raise AssertionError(f"{name} got no token in 2000 steps")


def test_a_long_prompt_advances_by_its_quarter_however_many_others_come() -> None:
    limits = {"max_batched_tokens": 64, "max_chunk_tokens": 64, "max_model_len": 1000}
    scheduler = make_scheduler(num_blocks=9000, max_num_seqs=32, prefix_caching=False, **limits)
    scheduler.add(request("long", 900))

    def others(step: int) -> None:
        if step < 32:
            scheduler.add(request(f"other{step}", 700, max_tokens=1))

    # ceil(64 / 4) tokens a step; equal shares among 32 would be 2.
    assert steps_until_first_token(scheduler, "long", others) <= 900 / 16 + 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_request_of_low_priority_is_passed_over_for_a_bounded_time(clock: list[float]) -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_passed_over_s=10.0, max_batched_tokens=8)
    for index in range(2):
        scheduler.add(request(f"first{index}", 30, first=10 * index, max_tokens=6))
    scheduler.add(request("late", 4, first=30, priority=5))

    def others(step: int) -> None:
        clock[0] = float(step)
        scheduler.add(request(f"other{step}", 30, first=10 * (step % 3), max_tokens=6))

    # Ten steps of one second until it is overdue, then until one of two sequences of some 20 steps ends.
    assert steps_until_first_token(scheduler, "late", others) <= 10 + 20 + 5


def test_waiting_for_a_shared_prefix_is_bounded_too(clock: list[float]) -> None:
    scheduler = make_scheduler(max_passed_over_s=10.0)
    scheduler.add(request("first", 40))
    run_step(scheduler)
    scheduler.add(request("same", 40))
    assert work_of(run_step(scheduler)[0]).keys() == {"first"}
    clock[0] = 11.0
    assert work_of(run_step(scheduler)[0]).keys() == {"first", "same"}


@pytest.mark.parametrize(
    ("bad", "error", "param"),
    [
        (GenerateRequest("x", (), SamplingParams()), InvalidRequestError, "prompt"),
        (GenerateRequest("x", (2, 50), SamplingParams()), InvalidRequestError, "prompt"),
        (GenerateRequest("x", (-1,), SamplingParams()), InvalidRequestError, "prompt"),
        (GenerateRequest("x", (2,), SamplingParams(logit_bias={50: 1.0})), InvalidRequestError, "logit_bias"),
        (GenerateRequest("x", (2,), SamplingParams(stop_token_ids=(-3,))), InvalidRequestError, "stop_token_ids"),
        (GenerateRequest("x", (2,) * 200, SamplingParams(max_tokens=1)), ContextLengthError, "prompt"),
        (GenerateRequest("x", (2,) * 100, SamplingParams(max_tokens=101)), ContextLengthError, "max_tokens"),
        (GenerateRequest("x", (2,) * 30, SamplingParams(max_tokens=40)), ContextLengthError, "max_tokens"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_what_can_never_run_is_refused_and_changes_nothing(
    bad: GenerateRequest, error: type[Exception], param: str
) -> None:
    scheduler = make_scheduler(num_blocks=16)
    before = scheduler.snapshot()
    with pytest.raises(error) as caught:
        scheduler.add(bad)
    assert caught.value.param == param  # type: ignore[attr-defined]
    assert scheduler.snapshot() == before and not scheduler.has_work


def test_the_queue_is_bounded() -> None:
    scheduler = make_scheduler(max_waiting_seqs=2)
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    with pytest.raises(OverloadedError):
        scheduler.add(request("c"))
    run_step(scheduler)
    scheduler.add(request("c"))


@pytest.mark.parametrize("seed", range(15))
def test_random_traffic_ends_with_every_block_back(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks=rng.randint(12, 30), max_num_seqs=rng.randint(1, 6))
    added, finished = set(), set()
    for index in range(150):
        if rng.random() < 0.3:
            size = rng.randint(1, 30)
            new = request(
                f"r{index}",
                size,
                first=rng.choice([0, 0, 17]),
                max_tokens=rng.randint(1, 15),
                priority=rng.randint(0, 1),
            )
            scheduler.add(new)
            added.add(new.request_id)
        if rng.random() < 0.1 and scheduler.request_ids:
            victim = rng.choice(scheduler.request_ids)
            chunk = scheduler.abort(victim)
            assert chunk is not None and chunk.finish_reason == "abort"
            finished.add(victim)
        finished |= {chunk.request_id for chunk in run_step(scheduler, rng.randint(2, 49))[1] if chunk.finish_reason}
    finished |= set(finish_order(scheduler))
    assert finished == added
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


def test_no_step_is_launched_ahead_of_a_prompt_cut_to_one_token() -> None:
    scheduler = make_scheduler(max_num_seqs=4, max_batched_tokens=4)
    for index in range(3):
        scheduler.add(request(f"talking{index}", 2, first=10 * index, max_tokens=50))
    while scheduler.snapshot().num_requests_waiting or any(seq.num_new_tokens > 1 for seq in scheduler._running):
        run_step(scheduler)
    scheduler.add(request("long", 20, first=30))
    batch = scheduler.schedule()
    assert batch is not None and work_of(batch)["long"] == 1
    assert scheduler.schedule_ahead(batch, with_prompts=True) is None


def test_a_prompt_that_waits_joins_the_step_ahead_only_where_it_may() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    scheduler.add(request("talking", 5, max_tokens=50))
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.add(request("new", 7, first=30))
    assert scheduler.schedule_ahead(batch, with_prompts=False) is None
    ahead = scheduler.schedule_ahead(batch, with_prompts=True)
    assert ahead is not None and work_of(ahead) == {"talking": 1, "new": 7}
    assert (ahead.previous_rows, ahead.samples) == ((0,), [0, 1])
    scheduler.commit(batch, [40], [None])
    both = scheduler.schedule_ahead(ahead, with_prompts=True)  # the prompt is whole: its first token is on the way, too
    assert both is not None and work_of(both) == {"talking": 1, "new": 1} and both.previous_rows == (0, 1)
    scheduler.commit(ahead, [41, 50], [None, None])
    scheduler.commit(both, [42, 51], [None, None])
    assert [seq.token_ids[-2:] for seq in scheduler._running] == [[41, 42], [50, 51]]
    scheduler.check_integrity()


def test_aborting_while_the_step_runs_discards_its_token() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a"))
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.abort("a")
    assert scheduler.commit(batch, [7], [None]) == []
    scheduler.check_integrity()
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
