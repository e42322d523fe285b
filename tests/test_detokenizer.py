"""The incremental detokenizer: any split of the tokens gives one text, and stop strings end it anywhere."""

from __future__ import annotations

import itertools
import time

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from app.config import EMBEDDED_MODEL
from app.tokenizer import Detokenizer, Tokenizer

TOKENIZER = Tokenizer(EMBEDDED_MODEL)
FAST = FastTokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))


def pieces(ids: list[int], cuts: list[int]) -> list[list[int]]:
    borders = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[low:high] for low, high in itertools.pairwise(borders)]


TOKEN_IDS = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 8200)), max_size=30)
CUTS = st.lists(st.integers(0, 1000), max_size=8)


@given(ids=TOKEN_IDS, cuts=CUTS, skip=st.booleans())
@settings(max_examples=200)
def test_any_split_gives_the_text_of_the_whole(ids: list[int], cuts: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=skip)
    text = "".join(detokenizer.add(piece) for piece in pieces(ids, cuts)) + detokenizer.finish()
    assert text == TOKENIZER.decode(ids, skip_special_tokens=skip)
    assert text == FAST.decode(ids, skip_special_tokens=skip)
    assert detokenizer.num_tokens == len(ids)


def cut_at_stop(ids: list[int], stop: tuple[str, ...]) -> tuple[str, str | None, int]:
    """By the definition: the stop string whose last character comes first, the longest of several."""
    whole = TOKENIZER.decode(ids)
    for end in range(1, len(whole) + 1):
        met = [text for text in stop if whole[:end].endswith(text)]
        if met:
            text = max(met, key=len)
            return whole[: end - len(text)], text, end
    return whole, None, len(whole)


@given(
    words=st.lists(st.sampled_from(["a", "b", "ab", "ba", " ", "aab", "日", "本", "🙂", "é"]), max_size=25),
    stop=st.lists(st.text(alphabet="ab 日🙂", min_size=1, max_size=4), max_size=4),
    cuts=CUTS,
)
@settings(max_examples=300)
def test_stop_strings_across_chunks_and_tokens(words: list[str], stop: list[str], cuts: list[int]) -> None:
    ids = [token_id for word in words for token_id in TOKENIZER.encode(word)]
    expected, stopped_by, end = cut_at_stop(ids, tuple(stop))
    detokenizer = Detokenizer(TOKENIZER, tuple(stop))
    seen = ""
    for piece in pieces(ids, cuts):
        seen += detokenizer.add(piece)
        assert expected.startswith(seen)
    assert seen + detokenizer.finish() == expected
    assert detokenizer.stopped_by == stopped_by
    if stopped_by is not None:
        num_tokens = detokenizer.num_tokens
        assert len(TOKENIZER.decode(ids[:num_tokens]).rstrip("\ufffd")) >= end
        assert len(TOKENIZER.decode(ids[: num_tokens - 1]).rstrip("\ufffd")) < end


def test_characters_and_stop_prefixes_are_held_back() -> None:
    emoji = TOKENIZER.encode("🙂")
    assert len(emoji) > 1
    detokenizer = Detokenizer(TOKENIZER, ("STOP",))
    assert [detokenizer.add([token_id]) for token_id in emoji] == [""] * (len(emoji) - 1) + ["🙂"]
    assert detokenizer.add(TOKENIZER.encode("one ST")) == "one "
    assert detokenizer.add(TOKENIZER.encode("AR ST")) == "STAR "
    assert detokenizer.add(TOKENIZER.encode("OP and more")) == ""
    assert detokenizer.stopped_by == "STOP"
    num_tokens = detokenizer.num_tokens
    assert detokenizer.add(TOKENIZER.encode("ignored")) == ""
    assert (detokenizer.finish(), detokenizer.num_tokens) == ("", num_tokens)


def test_an_unfinished_character_and_stop_string_come_out_at_the_end() -> None:
    detokenizer = Detokenizer(TOKENIZER, ("xyz",))
    assert detokenizer.add(TOKENIZER.encode("wxy")) == "w"
    assert detokenizer.add(TOKENIZER.encode("🙂")[:1]) == ""
    assert detokenizer.finish() == "xy\ufffd"


def test_min_tokens_delays_stop_strings() -> None:
    ids = TOKENIZER.encode("1212")
    assert len(ids) == 4
    detokenizer = Detokenizer(TOKENIZER, ("2",), min_tokens=2)
    assert detokenizer.add(ids) == "121"
    assert detokenizer.num_tokens == 4


def test_cost_per_token_does_not_grow() -> None:
    """Twice the tokens may take twice the time, not four times; the bound leaves room for a busy machine."""
    ids = TOKENIZER.encode("ab " * 2000)

    def seconds(repeats: int) -> float:
        best = float("inf")
        for _ in range(3):
            detokenizer = Detokenizer(TOKENIZER, ("abb", "ab ab x"))
            start = time.process_time()
            for token_id in ids * repeats:
                detokenizer.add([token_id])
            best = min(best, time.process_time() - start)
        return best

    assert any(seconds(8) < 8 * 2.5 * seconds(1) for _ in range(3))
