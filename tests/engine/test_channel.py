"""What rank 0 sends is what the others receive, however long; a beat is due only after a silence."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from app.engine import channel as channel_module
from app.engine.channel import HEAD_WORDS, Channel, Kind
from app.model.parallel import Group, Ranks


@dataclass
class Wire(Group):
    """A group of two in one process: what rank 0 broadcasts waits for rank 1."""

    sent: deque[torch.Tensor] = field(default_factory=deque)
    rank: int = 0
    size: int = 2
    num_reduced: int = 0

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        if self.rank == 0:
            self.sent.append(x.clone())
            return x
        return x.copy_(self.sent.popleft())

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.num_reduced += 1
        return x


def pair() -> tuple[Channel, Channel, Wire]:
    wire = Wire()
    alone = Ranks.alone()
    leader = Channel(replace(alone, host=wire, timeout_s=8.0))
    follower = Channel(replace(alone, host=Wire(wire.sent, rank=1), timeout_s=8.0))
    return leader, follower, wire


@pytest.mark.parametrize("count", [0, 1, HEAD_WORDS - 3, HEAD_WORDS - 2, HEAD_WORDS - 1, 3 * HEAD_WORDS])
def test_words_arrive_in_one_message_or_two(count: int) -> None:
    leader, follower, wire = pair()
    words = np.arange(5, 5 + count, dtype=np.int32)
    leader.send(Kind.STEP, np.full(HEAD_WORDS, -9, dtype=np.int32))
    follower.receive()
    leader.send(Kind.STEP, words)
    assert len(wire.sent) == (1 if count <= HEAD_WORDS - 2 else 2)
    kind, received = follower.receive()
    assert kind == Kind.STEP and np.array_equal(received, words)
    leader.send(Kind.STOP)
    kind, received = follower.receive()
    assert (kind, len(received)) == (Kind.STOP, 0)


def test_a_beat_is_sent_after_a_quarter_of_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    clock: Any = type("Clock", (), {"monotonic": staticmethod(lambda: now[0])})
    monkeypatch.setattr(channel_module, "time", clock)
    leader, follower, wire = pair()
    assert leader.beat_period_s == 2.0
    for step_s, num_sent in ((1.9, 0), (0.2, 1), (1.9, 1), (0.2, 2)):
        now[0] += step_s
        leader.keep_alive()
        assert len(wire.sent) == num_sent == wire.num_reduced
    assert follower.receive()[0] == Kind.BEAT


def test_of_one_rank_nothing_is_sent() -> None:
    channel = Channel(Ranks.alone())
    channel.send(Kind.STEP, np.zeros(3, dtype=np.int32))
    channel.keep_alive()
    assert channel.beat_period_s is None
