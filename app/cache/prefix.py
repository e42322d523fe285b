"""Names for cached prefixes: a block's key covers every token before it, the version and the caller's salt."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def root_key(version: str, salt: str) -> bytes:
    """The parent of a sequence's first block. Another version or salt can never read its blocks."""
    return hashlib.blake2b(f"{len(version)}:{version}{salt}".encode(), digest_size=16).digest()


def extend_keys(keys: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int) -> None:
    """Append the keys of the full blocks of `token_ids` that `keys` does not name yet."""
    for index in range(len(keys), len(token_ids) // block_size):
        parent = keys[index - 1] if index else root
        block = array("q", token_ids[index * block_size : (index + 1) * block_size])
        keys.append(hashlib.blake2b(parent + block.tobytes(), digest_size=16).digest())
