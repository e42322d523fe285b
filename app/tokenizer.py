"""Text <-> token ids: the chat template, encoding, incremental decoding and stop strings.

Only byte-level tokenizers are served (every family in view has one): each token is a run of bytes, so decoding is
joining bytes, and a stream of tokens is decoded by an incremental UTF-8 decoder.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from tokenizers import Tokenizer as FastTokenizer

from app.errors import CheckpointError, ContextLengthError, InvalidRequestError

ROLES = ("system", "developer", "user", "assistant")

# Unicode noncharacters, which no text should hold: one marks quoted control tokens while a template renders.
_MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))

# Templates cut the reasoning out of earlier answers by these tags, so an assistant message keeps them.
_REASONING_TAGS = frozenset({"<think>", "</think>"})


class Tokenizer:
    """The tokenizer of one checkpoint folder: tokenizer.json, tokenizer_config.json and chat_template.jinja.

    Attributes:
        vocab_size:  the highest token id + 1, added tokens included; a model may have more rows
        special_ids: ids that decoding leaves out by default
        bos_id: None where the tokenizer names none
        digest: the same for two folders whose tokenizers and templates are

    Raises: CheckpointError naming the file if one is missing or unusable.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        spec = _read_json(folder / "tokenizer.json")
        config = _read_json(folder / "tokenizer_config.json")
        if not _is_byte_level(spec.get("decoder")):
            raise CheckpointError("only byte-level tokenizers are served", file="tokenizer.json")
        added: list[dict[str, Any]] = spec.get("added_tokens") or []
        self._added_ids: dict[str, int] = {token["content"]: token["id"] for token in added}
        self.special_ids = frozenset(token["id"] for token in added if token["special"])
        template = folder / "chat_template.jinja"
        parts = [json.dumps(spec, sort_keys=True), json.dumps(config, sort_keys=True)]
        parts += [template.read_text(encoding="utf-8")] if template.is_file() else []
        self.digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        try:
            self._parsing = FastTokenizer.from_str(json.dumps(spec))
            self._plain = FastTokenizer.from_str(json.dumps({**spec, "added_tokens": []}))
            self._template = _compile_template(folder, config)
        except (jinja2.TemplateError, OSError) as error:
            raise CheckpointError(f"the chat template is not usable: {error}", file="chat_template.jinja") from None
        except Exception as error:  # tokenizers raises bare Exception
            raise CheckpointError(f"not readable: {error}", file="tokenizer.json") from None
        # The group makes `split` put control tokens at the odd places; "(?!)" matches nothing.
        control = _any_of(token for token in self._added_ids if len(token) > 1)
        self._control = re.compile(f"({control or '(?!)'})")
        self._names = _special_names(config)
        self._adds_bos = bool(config.get("add_bos_token"))
        self.bos_id = self._added_ids.get(self._names.get("bos_token", ""))
        self._bytes = _token_bytes(self._parsing.get_vocab(with_added_tokens=True), self._added_ids)
        self.vocab_size = len(self._bytes)
        self._longest_token_bytes = max(map(len, self._bytes), default=0) if _keeps_bytes(spec) else 0

    def min_tokens_of(self, text: str) -> int:
        """A lower bound of the number of tokens of a text, found without encoding it.

        0 where the tokenizer may shorten a text first, so that its length says nothing.
        """
        if not self._longest_token_bytes:
            return 0
        return -(-len(text.encode("utf-8", errors="surrogatepass")) // self._longest_token_bytes)

    def encode(self, text: str, *, param: str = "prompt", max_tokens: int | None = None) -> list[int]:
        """Token ids of a plain prompt, control tokens in it parsed and BOS added as the checkpoint asks.

        Raises InvalidRequestError naming `param` if the text is no valid Unicode, and ContextLengthError if it surely
        has more than `max_tokens` tokens: encoding takes some 0.4 s per megabyte.
        """
        self._check_length(_valid_unicode(text, param), param, max_tokens)
        ids = _encode(self._parsing, text, add_special_tokens=True)
        if self._adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None) -> list[int]:
        """Token ids of a conversation, each message {"role", "content"}, ready for the assistant's next turn.

        Only the template writes control tokens. What looks like one inside a message is quoted with a mark before
        rendering and encoded as ordinary text after it: the rendered text is split at control tokens, and the pieces
        between them go through a tokenizer that knows none.

        Raises InvalidRequestError naming messages or the message's field, ContextLengthError as `encode` does.
        """
        if self._template is None:
            raise InvalidRequestError("messages: this model has no chat template", param="messages")
        if not messages:
            raise InvalidRequestError("messages: at least one is needed", param="messages")
        turns = [_checked_message(message, index) for index, message in enumerate(messages)]
        mark = next((mark for mark in _MARKS if not any(mark in content for _, content in turns)), None)
        if mark is None:
            raise InvalidRequestError("messages: holds every Unicode noncharacter", param="messages")
        quoted = [{"role": role, "content": self._quote(role, content, mark)} for role, content in turns]
        try:
            text = self._template.render(
                messages=quoted, add_generation_prompt=True, tools=None, documents=None, **self._names
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"messages: the chat template refuses them: {error}", param="messages") from None
        self._check_length(text.replace(mark, ""), "messages", max_tokens)
        ids: list[int] = []
        for index, piece in enumerate(self._control.split(text)):
            if index % 2:
                ids.append(self._added_ids[piece])
            elif piece:
                ids.extend(_encode(self._plain, piece.replace(mark, ""), add_special_tokens=False))
        return ids

    def _check_length(self, text: str, param: str, max_tokens: int | None) -> None:
        num_tokens = self.min_tokens_of(text)
        if max_tokens is not None and num_tokens > max_tokens:
            raise ContextLengthError(
                f"{param}: at most {max_tokens} tokens fit the model's context, but the text has at least {num_tokens}",
                param=param,
            )

    def _quote(self, role: str, content: str, mark: str) -> str:
        def quote(match: re.Match[str]) -> str:
            token = match[0]
            return token if role == "assistant" and token in _REASONING_TAGS else mark.join(token) + mark

        return self._control.sub(quote, content)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these tokens; bytes that are no UTF-8 become U+FFFD, ids without a token nothing."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(token_id) for token_id in token_ids if token_id not in skipped)
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id the tokenizer does not know."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""


class Detokenizer:
    """Decodes one sequence's tokens as they come and watches for stop strings.

    `add` returns text that is final: never half a character, and nothing a stop string could still claim. The stop
    string completed first ends the text just before it (of several completed by one character, the longest).
    Each character costs one Knuth-Morris-Pratt step per stop string, whatever the length so far.

    Attributes:
        stopped_by: the stop string that was met, or None
        num_tokens: tokens consumed; once stopped, the last of them is the one that completed the stop string
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        *,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,  # stop strings count only in what follows this many tokens
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matchers = [_StopMatcher(text) for text in stop]
        self._held = ""
        self.stopped_by: str | None = None
        self.num_tokens = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """Consume tokens, up to the one that completes a stop string, and return the text that became final."""
        texts = []
        for token_id in token_ids:
            if self.stopped_by is not None:
                break
            self.num_tokens += 1
            if token_id not in self._skipped:
                texts.append(self._release(self._decoder.decode(self._tokenizer.token_bytes(token_id))))
        return "".join(texts)

    def finish(self) -> str:
        """Return what was held back, an incomplete character as U+FFFD. Call it once, when no token follows."""
        if self.stopped_by is not None:
            return ""
        text = self._release(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _release(self, text: str) -> str:
        if not self._matchers or self.num_tokens <= self._min_tokens:
            return text
        for index, char in enumerate(text):
            complete = [matcher.text for matcher in self._matchers if matcher.step(char)]
            if complete:
                self.stopped_by = max(complete, key=len)
                whole = self._held + text[: index + 1]
                self._held = ""
                return whole.removesuffix(self.stopped_by)
        whole = self._held + text
        final = len(whole) - max(matcher.matched for matcher in self._matchers)
        self._held = whole[final:]
        return whole[:final]


class _StopMatcher:
    """Finds one string in a stream of characters (Knuth, Morris, Pratt 1977). `matched`: characters of it seen last."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # fallback[n]: after n matched characters, the longest shorter match that may still go on
        self._fallback = [0, 0]
        for char in text[1:]:
            self._fallback.append(self._advance(char, self._fallback[-1]))

    def step(self, char: str) -> bool:
        """True if `char` completes the string."""
        self.matched = self._advance(char, self.matched)
        return self.matched == len(self.text)

    def _advance(self, char: str, matched: int) -> int:
        while matched and self.text[matched] != char:
            matched = self._fallback[matched]
        return matched + (self.text[matched] == char)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"not readable: {error}", file=path.name) from None
    if not isinstance(values, dict):
        raise CheckpointError("not a JSON object", file=path.name)
    return values


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if not decoder:
        return False
    return decoder["type"] == "ByteLevel" or any(map(_is_byte_level, decoder.get("decoders", ())))


def _encode(tokenizer: FastTokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    # Unlike `encode`, this lets other threads run meanwhile, and it computes no offsets, which halves the time.
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


def _keeps_bytes(spec: dict[str, Any]) -> bool:
    """Whether every byte of a text ends up in a token: nothing is normalised, cut or swallowed by a neighbour."""
    normalizer = spec.get("normalizer")
    if spec.get("truncation") or (normalizer and normalizer.get("normalizers") != []):
        return False
    if any(token["lstrip"] or token["rstrip"] for token in spec.get("added_tokens") or []):
        return False
    splitter = spec.get("pre_tokenizer") or {}
    splitters = splitter.get("pretokenizers", [splitter])
    return all(
        one.get("type") in ("ByteLevel", "Digits") or (one.get("type") == "Split" and one["behavior"] != "Removed")
        for one in splitters
    )


def _any_of(strings: Iterable[str]) -> str:
    """A regular expression for any of these strings, the longest first.

    Written as a tree of characters, so that a checkpoint's hundreds of control tokens cost no more than one each time
    a text holds how they begin.
    """
    rests: dict[str, list[str]] = {}
    for string in strings:
        rests.setdefault(string[:1], []).append(string[1:])
    branches = [re.escape(char) + _any_of(rest) for char, rest in rests.items() if char]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in rests else "")


def _special_names(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... by name: each a string or an object with `content`."""
    names = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            names[key] = text
    return names


def _token_bytes(vocab: dict[str, int], added: dict[str, int]) -> list[bytes]:
    """Bytes of every token id. Byte-level vocabularies write each byte as one printable character (GPT-2's map)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    byte_of = {chr(byte): byte for byte in printable}
    unprintable = [byte for byte in range(256) if chr(byte) not in byte_of]
    byte_of |= {chr(256 + index): byte for index, byte in enumerate(unprintable)}
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for text, token_id in vocab.items():
        if text in added or any(char not in byte_of for char in text):
            table[token_id] = text.encode("utf-8")
        else:
            table[token_id] = bytes(byte_of[char] for char in text)
    return table


def _compile_template(folder: Path, config: dict[str, Any]) -> jinja2.Template | None:
    """The chat template in the sandbox Hugging Face's library uses, with the same helpers; None if there is none."""
    path = folder / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.exists() else config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    if source is None:
        return None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment.from_string(source)


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)


def _checked_message(message: Mapping[str, Any], index: int) -> tuple[str, str]:
    """(role, content); "developer" is the newer name of "system". Templates paste the role, so it must be known."""
    param = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{param}: must be an object with role and content", param=param)
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        param = f"messages[{index}].role"
        raise InvalidRequestError(f"{param}: must be one of {', '.join(ROLES)}, got {role!r}", param=param)
    param = f"messages[{index}].content"
    if not isinstance(content, str):
        raise InvalidRequestError(f"{param}: must be a string, got {type(content).__name__}", param=param)
    return "system" if role == "developer" else str(role), _valid_unicode(content, param)


def _valid_unicode(text: str, param: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{param}: holds half a surrogate pair, which is no text", param=param) from None
    return text
