"""Reads the data of safetensors files to a device: several threads, each through a pinned buffer of its own.

One thread copies out of the page cache at a few GB/s; the bus takes many times that, and a disk wants several reads
in flight. Large sequential reads also spare the page faults of a memory-mapped file.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

NUM_READERS = 8
BUFFER_BYTES = 32 * 2**20


def data_offsets(path: Path) -> dict[str, int]:
    """Where each tensor's bytes begin in a safetensors file: 8 bytes of header length, the header, then the data."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    return {name: 8 + header_bytes + entry["data_offsets"][0] for name, entry in header.items() if "dtype" in entry}


class Uploader:
    """Runs submitted reads in its threads; the device sees their copies on the default stream, in any order."""

    def __init__(self, num_readers: int = NUM_READERS) -> None:
        self._num_readers = num_readers
        self._pool: ThreadPoolExecutor | None = None  # made for the first read: a model on the CPU needs none
        self._pending: list[Future[None]] = []
        self._local = threading.local()

    def submit(self, work: Callable[[], None]) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_readers, thread_name_prefix="longspan-reader")
        self._pending.append(self._pool.submit(work))

    def flush(self) -> None:
        """Wait for what was submitted; raises the first error among it."""
        pending, self._pending = self._pending, []
        try:
            for future in pending:
                future.result()
        except BaseException:
            for future in pending:
                future.cancel()
            raise

    def close(self) -> None:
        """End the threads and give their buffers back."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        self._local = threading.local()

    def read(self, path: Path, start: int, target: torch.Tensor) -> None:
        """Fill `target`, contiguous, on any device, from byte `start` on. In a reader's thread.

        Raises OSError, and EOFError if the file ends before.
        """
        target_bytes = target.view(-1).view(torch.uint8)
        is_cuda = target.is_cuda
        buffer = self._buffer(is_cuda)
        copied = torch.cuda.Event() if is_cuda else None
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            for first in range(0, target_bytes.shape[0], BUFFER_BYTES):
                part = buffer[: target_bytes.shape[0] - first]
                if copied is not None:
                    copied.synchronize()  # the buffer's last copy has left it
                _read_exactly(file.readinto, part.numpy().data)
                target_bytes[first : first + part.shape[0]].copy_(part, non_blocking=True)
                if copied is not None:
                    copied.record(torch.cuda.current_stream(target.device))
        if copied is not None:
            copied.synchronize()

    def _buffer(self, is_pinned: bool) -> torch.Tensor:
        buffer: torch.Tensor | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
            self._local.buffer = buffer
        return buffer


def _read_exactly(readinto: Callable[[memoryview], int | None], view: memoryview) -> None:
    while view:
        count = readinto(view)
        if not count:
            raise EOFError(f"ends {len(view)} bytes early")
        view = view[count:]
