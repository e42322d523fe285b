"""Who owns which cache block: free, shared by live sequences, or kept for reuse as a cached prefix.

free       num_refs 0, no key             next to be allocated, lowest id first
evictable  num_refs 0, key                a reusable prefix, evicted least recently used first
live       num_refs > 0, key or no key    in the block table of as many sequences
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Reference-counted blocks with an LRU of cached ones. A block id is in exactly one state at any time."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))  # a heap: neighbouring ids go to one sequence, which reads them as a view
        self._num_refs = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out: free and evictable."""
        return len(self._free) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        return len(self._evictable)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, evicting cached prefixes if need be. Raises ValueError if they are not there."""
        if count > self.num_free:
            raise ValueError(f"asked for {count} blocks, {self.num_free} are free")
        block_ids = [heapq.heappop(self._free) if self._free else self._evict() for _ in range(count)]
        for block_id in block_ids:
            self._num_refs[block_id] = 1
        return block_ids

    def _evict(self) -> int:
        block_id, _ = self._evictable.popitem(last=False)
        key = self._key_of[block_id]
        if key is not None:
            del self._block_of[key]
            self._key_of[block_id] = None
        return block_id

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest leading run of `keys` that is cached."""
        block_ids = []
        for key in keys:
            block_id = self._block_of.get(key)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block, live or evictable."""
        for block_id in block_ids:
            if self._num_refs[block_id] == 0:
                del self._evictable[block_id]
            self._num_refs[block_id] += 1

    def num_evictable(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks `share` would take out of the allocatable ones."""
        return sum(self._num_refs[block_id] == 0 for block_id in block_ids)

    def publish(self, block_id: int, key: bytes) -> None:
        """Make a full, computed block findable. A key that another block already holds is left there."""
        if self._key_of[block_id] is None and key not in self._block_of:
            self._key_of[block_id] = key
            self._block_of[key] = block_id

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference from each block. The tail is released first, so a prefix outlives its extensions."""
        for block_id in reversed(block_ids):
            self._num_refs[block_id] -= 1
            if self._num_refs[block_id] > 0:
                continue
            if self._key_of[block_id] is None:
                heapq.heappush(self._free, block_id)
            else:
                self._evictable[block_id] = None

    def clear_cached(self) -> None:
        """Forget every cached prefix that no live sequence holds."""
        while self._evictable:
            heapq.heappush(self._free, self._evict())

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise RuntimeError unless the states partition the blocks and match the live sequences' tables."""
        refs = Counter(block_id for table in tables for block_id in table)
        if any(refs[block_id] != num_refs for block_id, num_refs in enumerate(self._num_refs)):
            raise RuntimeError("block references differ from the live block tables")
        live = [block_id for block_id, num_refs in enumerate(self._num_refs) if num_refs]
        if sorted([*self._free, *self._evictable, *live]) != list(range(self.num_blocks)):
            raise RuntimeError("free, evictable and live blocks do not partition the pool")
        if any(self._key_of[block_id] is not None for block_id in self._free):
            raise RuntimeError("a free block still has a key")
        if any(self._key_of[block_id] is None for block_id in self._evictable):
            raise RuntimeError("an evictable block has no key")
        if {key: block_id for block_id, key in enumerate(self._key_of) if key is not None} != self._block_of:
            raise RuntimeError("the index of cached prefixes disagrees with the blocks' keys")
