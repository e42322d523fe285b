"""Independent parts of one operator on several threads, as many as torch is set to use."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

MIN_COST = 12_000_000  # multiply-adds: below, waking another thread takes longer than what it could take over
LOAD_COST = 4  # rows' worth of multiply-adds that reading a weight takes

Part = Callable[[], None]


def split(size: int, cost: int, parts_per_thread: int = 1) -> list[tuple[int, int]]:
    """0..size as ranges of about equal size: one unless the whole costs MIN_COST and there are threads for more."""
    num_threads = torch.get_num_threads()
    if num_threads == 1 or cost < MIN_COST:
        return [(0, size)]
    count = min(num_threads * parts_per_thread, size)
    return [(size * part // count, size * (part + 1) // count) for part in range(count)]


def run(parts: Sequence[Part]) -> None:
    """Run all parts, in any order, here and on helper threads; they spend their time outside of the interpreter's lock.

    A part that no helper has begun when the others are done is run here: nobody waits for a thread to be scheduled.
    """
    num_helpers = min(torch.get_num_threads(), len(parts)) - 1 if len(parts) > 1 else 0
    if num_helpers < 1:
        for part in parts:
            part()
        return
    round_ = _Round(parts)
    for helper in _helpers(num_helpers):
        helper.take(round_)
    num_own = round_.work()
    for _ in range(len(parts) - num_own):
        error = round_.finished.get()
        if error is not None:
            raise error


class _Round:
    """Parts that threads take until none is left."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._left = deque(parts)
        self.finished: SimpleQueue[BaseException | None] = SimpleQueue()  # one entry per part of a helper

    def work(self) -> int:
        """Returns the number of parts that this call ran."""
        count = 0
        while (part := self._take()) is not None:
            part()
            count += 1
        return count

    def help(self) -> None:
        while (part := self._take()) is not None:
            try:
                part()
            except BaseException as error:
                self.finished.put(error)
            else:
                self.finished.put(None)

    def _take(self) -> Part | None:
        try:
            return self._left.popleft()
        except IndexError:
            return None


class _Helper:
    """A thread, kept off the CPU of whoever gives it work.

    Linux likes to wake a thread where its waker runs; there it takes the time of the one that it should help.
    """

    def __init__(self) -> None:
        self._rounds: SimpleQueue[_Round] = SimpleQueue()
        self._avoided = -1
        self._thread = threading.Thread(target=self._serve, name="longspan-helper", daemon=True)
        self._thread.start()

    def take(self, round_: _Round) -> None:
        cpu = _current_cpu()
        if cpu != self._avoided:
            self._avoided = cpu
            others = os.sched_getaffinity(0) - {cpu}
            if others and self._thread.native_id is not None:
                os.sched_setaffinity(self._thread.native_id, others)
        self._rounds.put(round_)

    def _serve(self) -> None:
        while True:
            self._rounds.get().help()


_current_cpu = ctypes.CDLL(None).sched_getcpu
_lock = threading.Lock()
_known: list[_Helper] = []


def _helpers(count: int) -> list[_Helper]:
    """New ones are started while there are too few."""
    if len(_known) < count:
        with _lock:
            while len(_known) < count:
                _known.append(_Helper())
    return _known[:count]
