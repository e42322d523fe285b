"""Sharing a budget between pools."""

from __future__ import annotations

import random

import pytest

from app.serving.budget import Claim, Shares


def claim(target: int, wanted: int, **values: object) -> Claim:
    fields: dict[str, object] = {
        "num_running": target,
        "num_draining": 0,
        "min_replicas": 0,
        "cost": 1.0,
        "need": max(wanted, 1),
        "spare_to": wanted,
        "is_settled": True,
    } | values
    return Claim(target=target, wanted=wanted, **fields)  # type: ignore[arg-type]


def share(budget: float, **claims: Claim) -> dict[str, int]:
    shares = Shares(claims, budget)
    shares.settle()
    return shares.granted


def test_enough_for_both() -> None:
    assert share(8, a=claim(1, 3), b=claim(2, 4)) == {"a": 3, "b": 4}


def test_less_than_both_want_goes_to_the_one_that_lacks_most() -> None:
    assert share(5, a=claim(1, 4), b=claim(1, 4)) in ({"a": 3, "b": 2}, {"a": 2, "b": 3})
    assert share(6, a=claim(1, 2), b=claim(1, 4)) == {"a": 2, "b": 4}


def test_a_pool_gives_what_it_can_spare_but_not_before_it_has_stopped() -> None:
    waiting = share(4, a=claim(1, 2), b=claim(3, 3, spare_to=1))
    assert waiting == {"a": 1, "b": 2}
    stopped = share(4, a=claim(1, 2), b=claim(2, 2, spare_to=1))
    assert stopped == {"a": 2, "b": 2}


def test_a_replica_that_drains_holds_its_share() -> None:
    assert share(4, a=claim(1, 2), b=claim(2, 2, num_draining=1)) == {"a": 1, "b": 2}
    assert share(5, a=claim(1, 2), b=claim(2, 2, num_draining=1)) == {"a": 2, "b": 2}


def test_a_pool_keeps_what_it_was_about_to_give_up_though_nothing_is_free() -> None:
    assert share(3, a=claim(2, 2), b=claim(0, 1, num_running=1)) == {"a": 2, "b": 1}
    assert share(3, a=claim(2, 2), b=claim(0, 2, num_running=1)) == {"a": 2, "b": 1}
    assert share(3, a=claim(2, 2), b=claim(0, 1, num_running=0, num_draining=1)) == {"a": 2, "b": 0}


def test_a_pool_without_any_gets_one_from_a_pool_that_needs_all_it_has() -> None:
    assert share(4, a=claim(0, 1), b=claim(4, 4))["b"] == 3
    assert share(1, a=claim(0, 1), b=claim(1, 1)) == {"a": 0, "b": 1}
    assert share(4, a=claim(0, 1), b=claim(4, 4, min_replicas=4)) == {"a": 0, "b": 4}


def test_nothing_is_taken_if_it_would_not_suffice() -> None:
    assert share(8, a=claim(0, 1, cost=8.0), b=claim(3, 3)) == {"a": 0, "b": 3}


def test_the_pool_that_lacks_more_is_served_and_the_move_is_not_undone() -> None:
    assert share(6, a=claim(5, 5), b=claim(1, 5)) == {"a": 3, "b": 1}
    assert share(6, a=claim(3, 5), b=claim(1, 5)) == {"a": 3, "b": 3}
    assert share(6, a=claim(3, 5), b=claim(3, 5)) == {"a": 3, "b": 3}
    assert share(6, a=claim(5, 5), b=claim(1, 5, is_settled=False)) == {"a": 5, "b": 1}


def test_a_lowered_budget_is_kept_to_but_never_below_the_minimums() -> None:
    assert share(3, a=claim(4, 4), b=claim(2, 2, min_replicas=2)) == {"a": 1, "b": 2}
    assert share(1, a=claim(1, 1, min_replicas=1), b=claim(2, 2, min_replicas=2)) == {"a": 1, "b": 2}


def test_less_than_wanted_is_explained() -> None:
    shares = Shares({"a": claim(1, 3), "b": claim(2, 2)}, 3)
    shares.settle()
    assert "budget of 3" in shares.notes["a"][0]


@pytest.mark.parametrize("seed", range(200))
def test_random_claims(seed: int) -> None:
    draw = random.Random(seed)
    claims = {}
    for name in "abc"[: draw.randint(2, 3)]:
        target, least = draw.randint(0, 6), draw.randint(0, 1)
        wanted = max(least, draw.randint(0, 6))
        claims[name] = claim(
            max(target, least),
            wanted,
            num_running=draw.randint(0, 6),
            num_draining=draw.choice((0, 0, 1)),
            min_replicas=least,
            cost=draw.choice((1.0, 2.0, 8.0)),
            need=draw.randint(1, 6),
            spare_to=draw.randint(least, max(wanted, least)),
            is_settled=draw.random() < 0.5,
        )
    budget = sum(one.cost * one.min_replicas for one in claims.values()) + draw.randint(0, 20)
    shares = Shares(claims, budget)
    shares.settle()
    assert sum(one.cost * shares.granted[name] for name, one in claims.items()) <= budget
    for name, one in claims.items():
        assert one.min_replicas <= shares.granted[name] <= max(one.wanted, one.min_replicas)
        raised = shares.granted[name] > max(one.target, one.num_running)
        held = sum(
            one.cost * (max(shares.granted[other], one.num_running) + one.num_draining) for other, one in claims.items()
        )
        assert not raised or held <= budget
