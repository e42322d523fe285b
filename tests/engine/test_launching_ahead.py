"""What a device does to hide the host's work, here on a CPU: the next step starts before this one is committed."""

from __future__ import annotations

import pytest

from app.config import EngineConfig, ModelSource
from app.engine.batch import Batch
from app.engine.engine import Engine
from app.engine.loading import load_engine
from app.engine.runner import Runner
from app.engine.sampler import PendingSample, needs_host
from app.protocol import GenerateRequest, SamplingParams
from tests.engine.test_engine import LENGTHS, greedy, make_engine, prompt_of, run, sampled_requests, tokens_of


class AheadRunner(Runner):
    can_run_ahead = True  # type: ignore[assignment]


@pytest.fixture
def ahead() -> Engine:
    engine = make_engine(cache_blocks=64)
    engine._runner.__class__ = AheadRunner  # this engine's alone
    return engine


@pytest.fixture
def batches(ahead: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """Those launched ahead."""
    found: list[Batch] = []
    schedule_ahead = ahead._scheduler.schedule_ahead

    def noted(batch: Batch, *, with_prompts: bool) -> Batch | None:
        result = schedule_ahead(batch, with_prompts=with_prompts)
        found.extend([result] if result else [])
        return result

    monkeypatch.setattr(ahead._scheduler, "schedule_ahead", noted)
    return found


def drawn(name: str, length: int, max_tokens: int, seed: int = 3) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=2.0, seed=seed)
    return GenerateRequest(name, prompt_of(length), sampling)


def arriving(engine: Engine, requests: list[GenerateRequest]) -> dict[str, tuple[int, ...]]:
    """One more request every other step; the books are checked after each."""
    tokens: dict[str, tuple[int, ...]] = {request.request_id: () for request in requests}
    waiting, step = list(requests), 0
    while waiting or engine.has_work:
        if waiting and step % 2 == 0:
            engine.add(waiting.pop(0))
        for chunk in engine.step():
            tokens[chunk.request_id] += chunk.token_ids
        engine.check_integrity()
        step += 1
    return tokens


def test_no_token_changes(ahead: Engine, batches: list[Batch]) -> None:
    plain = make_engine(cache_blocks=64)
    expected = run(plain, sampled_requests("plain"))
    chunks = run(ahead, sampled_requests("plain"))
    assert {name: tokens_of(found) for name, found in chunks.items()} == {
        name: tokens_of(found) for name, found in expected.items()
    }
    requests = [drawn(f"p{length}", length, 9 + length % 5) for length in LENGTHS]
    requests.append(greedy("stop", prompt_of(70), 20, stop_token_ids=(tokens_of(expected["plain-63"])[3],)))
    assert {name: tokens_of(found) for name, found in run(ahead, requests).items()} == {
        name: tokens_of(found) for name, found in run(plain, requests).items()
    }
    assert len(batches) > 5
    assert ahead.stats().num_free_blocks == 64


def test_prompts_that_arrive_join_a_step_ahead_and_no_token_changes(ahead: Engine, batches: list[Batch]) -> None:
    requests = [drawn(f"d{length}", length, 4 + length % 7, seed=length) for length in (5, 70, 33, 130, 64, 1, 90)]
    requests += [greedy("bias", prompt_of(20), 6, logit_bias={7: 3.0}), greedy("late", prompt_of(40), 30)]
    assert arriving(ahead, requests) == arriving(make_engine(cache_blocks=64), requests)
    with_prompts = [batch for batch in batches if len(batch.previous_rows) < len(batch.sequences)]
    assert len(with_prompts) >= 3
    # Sampling for these waits for the device, and with it whatever else the engine's thread has to do.
    assert not any(needs_host(seq) for batch in batches for seq in batch.sequences)
    assert ahead.stats().num_free_blocks == 64


def test_what_is_aborted_on_the_way_leaves_the_others_alone(ahead: Engine, batches: list[Batch]) -> None:
    requests = [drawn(name, length, 25) for name, length in (("a", 30), ("gone", 60), ("c", 64))]
    expected = arriving(make_engine(cache_blocks=64), [requests[0], requests[2]])
    for request in requests:
        ahead.add(request)
    tokens: dict[str, tuple[int, ...]] = {"a": (), "gone": (), "c": ()}
    while ahead.has_work:
        for chunk in ahead.step():
            tokens[chunk.request_id] += chunk.token_ids
        if len(tokens["gone"]) == 7:
            ahead.abort("gone")
        ahead.check_integrity()
    assert {name: tokens[name] for name in expected} == expected
    assert batches and ahead.stats().num_free_blocks == 64


class UnmixedRunner(Runner):
    can_mix_ahead = False  # type: ignore[assignment]


@pytest.mark.gpu
def test_prompts_in_steps_ahead_change_no_token_on_cuda() -> None:
    config = EngineConfig(device="cuda", batch_invariant=True, cache_blocks=64, max_chunk_tokens=96)
    requests = [drawn(f"d{length}", length, 5 + length % 9, seed=length) for length in (5, 70, 33, 300, 64, 1, 90)]
    mixed, unmixed = (load_engine(ModelSource(), config) for _ in range(2))
    unmixed._runner.__class__ = UnmixedRunner
    assert arriving(mixed, requests) == arriving(unmixed, requests)


def test_a_step_launched_ahead_is_timed_by_the_device(ahead: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is late to notice that a step has ended while it launches the next one, and takes that for shorter."""
    times: list[float] = []
    monkeypatch.setattr(PendingSample, "seconds_after", lambda _self, _previous: 7.0)
    monkeypatch.setattr(ahead._scheduler, "record_step_time", lambda _batch, step_s: times.append(step_s))
    run(ahead, [greedy("a", prompt_of(5), 4)])
    assert times[0] < 7.0 and times[1:] == [7.0] * 3
