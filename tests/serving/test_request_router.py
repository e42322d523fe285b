"""Serve sends to the replica that is named, and to the less loaded of two others where it cannot."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from app.serving.request_router import NamedReplicaRouter

REPLICAS: list[Any] = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "abcd"]


def ranks(name: str, replicas: list[Any]) -> list[list[str]]:
    pending: Any = SimpleNamespace(metadata=SimpleNamespace(session_id=name))
    router = NamedReplicaRouter.__new__(NamedReplicaRouter)
    chosen = asyncio.run(router.choose_replicas(replicas, pending))
    return [[replica.replica_id.unique_id for replica in rank] for rank in chosen]


def test_the_named_one_comes_first_and_two_others_take_what_it_cannot() -> None:
    for _ in range(20):
        first, others = ranks("b", REPLICAS)
        assert first == ["b"] and len(set(others)) == 2 and "b" not in others


def test_where_none_is_named_or_it_has_gone_two_are_drawn_by_chance() -> None:
    for name in ("", "gone"):
        drawn = [ranks(name, REPLICAS) for _ in range(100)]
        assert all(len(rank) == 1 and len(set(rank[0])) == 2 for rank in drawn)
        assert {name for rank in drawn for name in rank[0]} == set("abcd")


def test_few_replicas() -> None:
    assert ranks("a", REPLICAS[:1]) == [["a"]]
    assert ranks("", REPLICAS[:1]) == [["a"]]
    assert ranks("", []) == []
