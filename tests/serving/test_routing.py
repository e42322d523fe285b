"""Pool and version choice."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from app.config import RouterSettings
from app.errors import UnavailableError
from app.serving.routing import (
    OutputEstimate,
    PoolLimits,
    PoolLoad,
    PoolName,
    PrefixDirectory,
    PrefixKey,
    ReplicaLoad,
    bucket_of,
    choose_pool,
    choose_replica,
    choose_version,
    predicted_cost_tokens,
    prefix_keys,
)

SETTINGS = RouterSettings(short_max_cost_tokens=100, expected_output_tokens=20)
LIMITS: dict[PoolName, PoolLimits] = {
    "short": PoolLimits(max_model_len=120, vocab_size=10, version="v"),
    "long": PoolLimits(max_model_len=1000, vocab_size=10, version="v"),
}


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "pool"),
    [
        (80, None, "short"),  # 80 + 20 expected
        (81, None, "long"),
        (81, 5, "short"),  # max_tokens caps the expectation
        (90, 10, "short"),
        (90, 11, "long"),
        (80, 40, "short"),  # the worst case, 120, just fits
        (80, 41, "long"),  # predicted short, but it might not fit
        (5000, 1, "long"),  # fits nowhere: judged later, against the long pool
    ],
)
def test_choose_pool(prompt: int, max_tokens: int | None, pool: str) -> None:
    assert choose_pool(prompt, max_tokens, LIMITS, SETTINGS) == pool


def test_a_prompt_that_fills_the_short_pool_is_long() -> None:
    settings = RouterSettings(short_max_cost_tokens=1000, expected_output_tokens=1)
    assert choose_pool(119, None, LIMITS, settings) == "short"
    assert choose_pool(120, None, LIMITS, settings) == "long"


def test_a_pool_that_never_reported_is_starting() -> None:
    with pytest.raises(UnavailableError, match="short"):
        choose_pool(1, 1, {"long": LIMITS["long"]}, SETTINGS)
    with pytest.raises(UnavailableError, match="long"):
        choose_pool(500, 1, {"short": LIMITS["short"]}, SETTINGS)


def test_predicted_cost() -> None:
    assert predicted_cost_tokens(10, None, 20) == 30
    assert predicted_cost_tokens(10, 5, 20) == 15
    assert predicted_cost_tokens(10, 500, 20) == 30


def test_versions_share_by_weight() -> None:
    picks = Counter(choose_version(["a", "b", "c"], {"a": 3, "b": 1}, i / 100) for i in range(100))
    assert picks == {"a": 75, "b": 25}
    assert Counter(choose_version(["a", "b"], {}, i / 100) for i in range(100)) == {"a": 50, "b": 50}


def test_weight_zero_takes_nothing() -> None:
    with pytest.raises(UnavailableError):
        choose_version(["a"], {"a": 0.0}, 0.0)
    with pytest.raises(UnavailableError):
        choose_version(["a"], {"other": 1.0}, 0.5)


# ---- estimates and spill ----

ROOMY: dict[PoolName, PoolLoad] = {
    "short": PoolLoad(num_replicas=2, running_seqs=3, prefill_tokens_per_s=1000.0),
    "long": PoolLoad(1),
}
QUEUEING = PoolLoad(num_replicas=2, running_seqs=9, waiting_seqs=4, prefill_tokens_per_s=1000.0)


def test_an_estimate_follows_what_is_seen() -> None:
    estimate = OutputEstimate(256.0)
    for _ in range(300):
        estimate = estimate.observe(40)
    assert estimate.mean_tokens == pytest.approx(40, abs=1)


def test_a_buckets_estimate_replaces_the_configured_one() -> None:
    assert bucket_of(100, SETTINGS) == "short" and bucket_of(101, SETTINGS) == "long"
    assert choose_pool(90, None, LIMITS, SETTINGS) == "long"
    assert choose_pool(90, None, LIMITS, SETTINGS, expected_output_tokens=9.6) == "short"
    assert choose_pool(90, 5, LIMITS, SETTINGS, expected_output_tokens=500) == "short"


@pytest.mark.parametrize(
    ("short", "long", "pool"),
    [
        (QUEUEING, PoolLoad(num_replicas=1), "long"),
        (QUEUEING, PoolLoad(num_replicas=1, running_seqs=1), "short"),
        (QUEUEING, PoolLoad(num_replicas=1, waiting_seqs=1), "short"),
        (QUEUEING, PoolLoad(num_replicas=0), "short"),
        (PoolLoad(num_replicas=0), PoolLoad(num_replicas=1), "long"),
        (ROOMY["short"], PoolLoad(num_replicas=1), "short"),
    ],
)
def test_a_short_request_spills_only_into_an_idle_long_pool(short: PoolLoad, long: PoolLoad, pool: str) -> None:
    assert choose_pool(10, 5, LIMITS, SETTINGS, loads={"short": short, "long": long}) == pool


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "loads", "pool"),
    [
        (101, 5, {"short": ROOMY["short"], "long": QUEUEING}, "short"),
        (101, 5, {"short": QUEUEING, "long": QUEUEING}, "long"),  # nobody may wait for it there
        (101, 5, ROOMY, "long"),  # the long pool has room
        (101, 20, {"short": ROOMY["short"], "long": QUEUEING}, "long"),  # beyond the short pool's context
        (101, None, {"short": ROOMY["short"], "long": QUEUEING}, "long"),  # might run on to the end of it
        (101, 5, {"short": PoolLoad(num_replicas=2), "long": QUEUEING}, "long"),  # speed unknown
        (101, 5, {"short": PoolLoad(2, prefill_tokens_per_s=100.0), "long": QUEUEING}, "long"),  # 1 s: too long
        (101, 5, {"short": PoolLoad(num_replicas=0), "long": QUEUEING}, "long"),
    ],
)
def test_a_long_request_spills_only_inside_the_short_pools_limits_and_the_fairness_bound(
    prompt: int, max_tokens: int | None, loads: dict[PoolName, PoolLoad], pool: str
) -> None:
    assert choose_pool(prompt, max_tokens, LIMITS, SETTINGS, loads=loads) == pool


# ---- replicas ----


def picks(replicas: list[ReplicaLoad], **more: Any) -> Counter[str]:
    chance = random.Random(1).random
    return Counter(choose_replica(replicas, chance(), other_chance=chance(), **more) for _ in range(600))


def test_equals_share_by_chance_and_the_busy_one_gets_nothing() -> None:
    replicas = [ReplicaLoad("a"), ReplicaLoad("b"), ReplicaLoad("c", num_seqs=5)]
    found = picks(replicas)
    assert set(found) == {"a", "b"}
    assert min(found.values()) > 240


def test_waiting_prompt_tokens_and_what_was_just_sent_count() -> None:
    assert set(picks([ReplicaLoad("a", waiting_prefill_tokens=50_000), ReplicaLoad("b", num_seqs=4)])) == {"b"}
    assert set(picks([ReplicaLoad("a", sent_seqs=3), ReplicaLoad("b", num_seqs=1)])) == {"b"}


def test_a_full_cache_is_avoided_while_another_replica_has_room() -> None:
    full = ReplicaLoad("full", kv_usage=0.99)
    assert set(picks([full, ReplicaLoad("b", num_seqs=30, kv_usage=0.5)])) == {"b"}
    assert set(picks([full])) == {"full"}


def test_stale_figures_degrade_to_the_better_of_two_drawn_by_chance() -> None:
    replicas = [ReplicaLoad(name, num_seqs=load, age_s=60.0) for name, load in (("a", 0), ("b", 5), ("c", 9))]
    found = picks(replicas)
    assert found["a"] > found["b"] > 100
    assert found["c"] == 0
    assert set(picks(replicas[:1])) == {"a"}


def test_the_holder_of_the_prefix_is_kept_until_it_is_far_busier_than_the_others() -> None:
    others = [ReplicaLoad("b", num_seqs=4), ReplicaLoad("c", num_seqs=4)]
    assert set(picks([ReplicaLoad("a", num_seqs=6), *others], preferred=("a",))) == {"a"}
    assert set(picks([ReplicaLoad("a", num_seqs=20), *others], preferred=("a",))) == {"b", "c"}
    assert "gone" not in picks(others, preferred=("gone",))


def test_no_replica() -> None:
    with pytest.raises(UnavailableError):
        choose_replica([], 0.5)


def test_a_burst_with_one_prefix_spreads_evenly_enough_and_mostly_hits() -> None:
    sent = Counter({"a": 0, "b": 0, "c": 0})
    directory, keys, chance, num_hits = PrefixDirectory(), prefix_keys(range(512)), random.Random(2), 0
    for _ in range(64):
        loads = [ReplicaLoad(name, sent_seqs=count) for name, count in sent.items()]
        holders = directory.find(keys).holders
        name = choose_replica(loads, chance.random(), holders, other_chance=chance.random())
        num_hits += name in holders
        directory.record(keys, name)
        sent[name] += 1
    assert max(sent.values()) <= 1.5 * 64 / 3
    assert num_hits >= 32


def test_a_conversations_turns_share_their_prefixes() -> None:
    first, second = list(range(300)), list(range(700))
    assert [key.num_tokens for key in prefix_keys(first)] == [64, 128, 192, 256]
    assert [key.num_tokens for key in prefix_keys(second)] == [64, 128, 192, 256, 320, 400, 500, 625]
    assert prefix_keys(second)[:4] == prefix_keys(first)
    assert not set(prefix_keys(first)) & set(prefix_keys(first, cache_salt="other"))
    assert prefix_keys(range(63)) == []
    directory = PrefixDirectory()
    directory.record(prefix_keys(first), "a")
    assert directory.find(prefix_keys(second)) == (256, ("a",))
    directory.record(prefix_keys(second), "b")
    assert directory.find(prefix_keys(second)) == (625, ("b",))
    assert directory.find(prefix_keys(first)) == (256, ("b", "a"))
    assert directory.find(prefix_keys([*range(64), *range(900, 1200)])) == (64, ("b", "a"))
    assert directory.find(prefix_keys(range(5, 700))) == (0, ())


def test_the_directory_forgets_what_was_used_longest_ago() -> None:
    directory = PrefixDirectory(max_keys=3)
    one, two, three, four = (PrefixKey(64, name) for name in (b"1", b"2", b"3", b"4"))
    directory.record([one, two], "a")
    directory.record([three], "a")
    directory.record([one], "b")
    directory.record([four], "a")
    assert directory.find([two]).holders == ()
    assert directory.find([one]).holders == ("b", "a")
