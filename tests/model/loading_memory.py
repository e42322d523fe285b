"""Loads one rank's part of a checkpoint in a process of its own.

    python -m tests.model.loading_memory FOLDER RANK TENSOR EXPERT DTYPE

Prints JSON: anonymous memory at the peak and at the end, over that before, and the bytes read. Pages of the mapped
files do not count: the kernel takes them back whenever it wants to.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch

from app.model.checkpoint import Checkpoint
from app.model.config import ModelConfig
from app.model.sharding import Shard
from app.model.weights import load_weights


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


def main(folder: Path, rank: int, tensor: int, expert: int, dtype: torch.dtype) -> None:
    config = ModelConfig.from_folder(folder)
    shard = Shard.of(config, rank, tensor, expert)
    torch.set_num_threads(1)
    torch.randn(64, 64) @ torch.randn(64, 64)
    before, peak, is_done = anonymous_bytes(), 0, threading.Event()
    read = 0

    def watch() -> None:
        nonlocal peak
        while not is_done.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.002)

    close = Checkpoint.close

    def closing(self: Checkpoint, *args: object) -> None:
        nonlocal read
        read = self.bytes_read
        close(self, *args)  # type: ignore[arg-type]

    Checkpoint.close = closing  # type: ignore[method-assign]
    watcher = threading.Thread(target=watch)
    watcher.start()
    weights = load_weights(folder, config, dtype=dtype, device="cpu", shard=shard)
    is_done.set()
    watcher.join()
    print(json.dumps({"peak": peak - before, "end": anonymous_bytes() - before, "read": read}))
    del weights


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), dtype=getattr(torch, sys.argv[5]))
