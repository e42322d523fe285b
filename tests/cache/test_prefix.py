from __future__ import annotations

from app.cache.prefix import extend_keys, root_key


def keys_of(tokens: list[int], version: str = "v", salt: str = "") -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root_key(version, salt), tokens, block_size=4)
    return keys


def test_only_full_blocks_have_keys() -> None:
    assert [len(keys_of(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_key_covers_everything_before_its_block() -> None:
    same_second_block = keys_of([1, 2, 3, 4, 5, 6, 7, 8])[1], keys_of([0, 2, 3, 4, 5, 6, 7, 8])[1]
    assert same_second_block[0] != same_second_block[1]


def test_keys_grow_with_the_sequence_as_if_made_at_once() -> None:
    keys = keys_of([1, 2, 3, 4])
    extend_keys(keys, root_key("v", ""), [1, 2, 3, 4, 5, 6, 7, 8, 9], block_size=4)
    assert keys == keys_of([1, 2, 3, 4, 5, 6, 7, 8, 9])


def test_versions_and_salts_never_share() -> None:
    tokens = [1, 2, 3, 4]
    keys = {
        keys_of(tokens, version, salt)[0] for version, salt in [("a", ""), ("b", ""), ("a", "s"), ("as", ""), ("", "a")]
    }
    assert len(keys) == 5
