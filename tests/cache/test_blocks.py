from __future__ import annotations

import random

import pytest

from app.cache.blocks import BlockPool


def test_neighbouring_blocks_go_to_one_sequence() -> None:
    assert BlockPool(8).allocate(5) == [0, 1, 2, 3, 4]


def test_allocating_more_than_there_is_changes_nothing() -> None:
    pool = BlockPool(3)
    held = pool.allocate(2)
    with pytest.raises(ValueError, match="asked for 2 blocks, 1 are free"):
        pool.allocate(2)
    pool.check_integrity([held])


def test_a_released_prefix_is_found_again_until_it_is_evicted() -> None:
    pool = BlockPool(3)
    first = pool.allocate(2)
    pool.publish(first[0], b"a")
    pool.publish(first[1], b"ab")
    pool.release(first)
    assert pool.num_free == 3
    assert pool.find([b"a", b"ab", b"abc"]) == first
    assert len(pool.allocate(2)) == 2  # the unused block, then one eviction
    assert pool.find([b"a", b"ab"]) == first[:1], "the tail goes first, so the prefix stays usable"


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(2)
    old, new = pool.allocate(1), pool.allocate(1)
    pool.publish(old[0], b"old")
    pool.publish(new[0], b"new")
    pool.release(old)
    pool.release(new)
    pool.share(old)  # used again
    pool.release(old)
    pool.allocate(1)
    assert pool.find([b"old"]) == old
    assert pool.find([b"new"]) == []


def test_a_shared_block_is_free_only_after_its_last_owner() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.publish(blocks[0], b"k")
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_free == 1
    pool.check_integrity([blocks])
    pool.release(blocks)
    assert pool.num_free == 2


def test_a_key_names_one_block_only() -> None:
    pool = BlockPool(2)
    a, b = pool.allocate(1), pool.allocate(1)
    pool.publish(a[0], b"k")
    pool.publish(b[0], b"k")
    assert pool.find([b"k"]) == a
    pool.release(b)
    pool.check_integrity([a])


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_keep_the_books_balanced(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(12)
    tables: list[list[int]] = []
    for _ in range(200):
        action = rng.choice(["allocate", "share", "release", "publish"])
        if action == "allocate" and (count := rng.randint(0, 4)) <= pool.num_free:
            tables.append(pool.allocate(count))
        elif action == "share" and (found := pool.find([bytes([rng.randrange(6)])])):
            pool.share(found)
            tables.append(found)
        elif action == "release" and tables:
            pool.release(tables.pop(rng.randrange(len(tables))))
        elif action == "publish" and tables and (table := rng.choice(tables)):
            pool.publish(rng.choice(table), bytes([rng.randrange(6)]))
        pool.check_integrity(tables)
    for table in tables:
        pool.release(table)
    pool.check_integrity([])
    assert pool.num_free == 12


def test_integrity_check_sees_a_leak() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(RuntimeError, match="block references"):
        pool.check_integrity([])
