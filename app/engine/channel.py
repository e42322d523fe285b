"""How rank 0 tells the other ranks what to do next: a few words over the host's process group, then all of them do it.

words  kind | number of words that follow | words ...        the first HEAD_WORDS at once, the rest if there is one
"""

from __future__ import annotations

import time
from enum import IntEnum

import numpy as np
import torch

from app.engine.plan import Words
from app.model.parallel import Ranks

HEAD_WORDS = 4096  # a step of 32 decodes with contexts of up to 8k tokens fits
BEATS_PER_TIMEOUT = 4


class Kind(IntEnum):
    STOP = 0
    BEAT = 1  # nothing to do; every rank answers
    STEP = 2  # words: the plan
    WARM_UP = 3
    CAPTURE = 4


class Channel:
    """Of one rank everything here is a no-op. Raises RankLostError wherever it waits for a rank in vain."""

    def __init__(self, ranks: Ranks) -> None:
        self._group, self._size = ranks.host, ranks.host.size
        self.beat_period_s = None if self._size == 1 else ranks.timeout_s / BEATS_PER_TIMEOUT
        self._sent_s = time.monotonic()
        self._head = torch.zeros(HEAD_WORDS, dtype=torch.int32)

    def send(self, kind: Kind, words: Words | None = None) -> None:
        """Rank 0 tells the others."""
        if self._size == 1:
            return
        count = 0 if words is None else len(words)
        head, num_inside = self._head.numpy(), min(count, HEAD_WORDS - 2)
        head[:2] = kind, count
        if words is not None:
            head[2 : 2 + num_inside] = words[:num_inside]
        self._group.broadcast(self._head)
        if words is not None and count > num_inside:
            self._group.broadcast(torch.from_numpy(words[num_inside:]))
        self._sent_s = time.monotonic()

    def keep_alive(self) -> None:
        """Let every rank show that it lives, if nothing was sent for a while."""
        if self.beat_period_s is not None and time.monotonic() - self._sent_s >= self.beat_period_s:
            self.send(Kind.BEAT)
            self.answer_beat()

    def receive(self) -> tuple[Kind, Words]:
        """Another rank waits for what rank 0 sends next."""
        self._group.broadcast(self._head)
        head = self._head.numpy()
        kind, count = Kind(head[0]), int(head[1])
        words = head[2 : 2 + count].copy()
        if count > len(words):
            rest = torch.empty(count - len(words), dtype=torch.int32)
            words = np.concatenate([words, self._group.broadcast(rest).numpy()])
        return kind, words

    def answer_beat(self) -> None:
        self._group.all_reduce(torch.zeros(1))
