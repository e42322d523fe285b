"""Where the ranks of a replica stand and meet; the actor itself runs in tests/cluster/test_shards.py."""

from __future__ import annotations

import os
import socket

import pytest

from app.config import ParallelConfig
from app.serving import rank as module
from app.serving.rank import PORTS, meeting_point, rank_places


def test_places_of_the_ranks_of_two_by_two() -> None:
    parallel = ParallelConfig(tensor=2, expert=2, collective_timeout_s=7, expert_placement="experts.json")
    places = rank_places(parallel, "tcp://h:1")
    assert [place.rank for place in places] == [0, 1, 2, 3]
    assert {(place.tensor, place.expert, place.timeout_s, place.init_method) for place in places} == {
        (2, 2, 7.0, "tcp://h:1")
    }
    assert places[3].expert_placement == "experts.json"


def test_the_meeting_point_is_free_and_out_of_the_way_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_own_address", lambda: "127.0.0.1")
    address, _, port = meeting_point().removeprefix("tcp://").partition(":")
    assert address == "127.0.0.1" and int(port) in PORTS
    with socket.socket() as held:
        held.bind(("127.0.0.1", int(port)))
        monkeypatch.setattr(module.random, "sample", lambda *_: [int(port), *PORTS])
        assert not meeting_point().endswith(f":{port}")


def test_process_groups_use_the_interface_of_the_nodes_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"NCCL_SOCKET_IFNAME": "chosen"})
    monkeypatch.setattr(module, "_own_address", lambda: "127.0.0.1")
    module.talk_over_own_interface()
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "chosen")
