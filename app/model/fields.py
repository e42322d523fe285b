"""Checked reads from a checkpoint's JSON files: a wrong field is a CheckpointError that names file and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from app.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError that names the file unless it holds a JSON object."""
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})", file=str(path)) from None
    except ValueError as error:
        raise CheckpointError(f"is not JSON ({error})", file=str(path)) from None
    if not isinstance(values, dict):
        raise CheckpointError("expected a JSON object", file=str(path))
    return values


class Fields:
    """A JSON object whose every read is checked; `path` and `prefix` locate the field in errors."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.path, self.values, self.prefix = path, values, prefix

    @classmethod
    def read(cls, path: Path) -> Fields:
        """Raises CheckpointError unless the file is there and holds a JSON object."""
        return cls(path, read_json(path))

    def fail(self, name: str, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.prefix}{name}: {problem}", file=str(self.path))

    def _get(self, name: str, kinds: tuple[type, ...], what: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            return self.fail(name, "is missing") if default is ... else default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            self.fail(name, f"expected {what}, got {value!r}")
        return value

    def integer(self, name: str, default: Any = ..., *, minimum: int = 1) -> Any:
        value = self._get(name, (int,), "an integer", default)
        if value is not None and value < minimum:
            self.fail(name, f"expected at least {minimum}, got {value}")
        return value

    def number(self, name: str, default: Any = ...) -> Any:
        value = self._get(name, (int, float), "a number", default)
        return None if value is None else float(value)

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._get(name, (bool,), "true or false", default))

    def text(self, name: str, default: Any = ...) -> str:
        return str(self._get(name, (str,), "a string", default))

    def child(self, name: str) -> Fields | None:
        values = self._get(name, (dict,), "an object", None)
        return None if values is None else Fields(self.path, values, f"{self.prefix}{name}.")

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self._get(name, (int, list), "a token id or a list of them", [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token_id, int) for token_id in ids):
            self.fail(name, f"expected a token id or a list of them, got {value!r}")
        return tuple(ids)

    def must_be(self, name: str, value: Any, *supported: Any) -> None:
        if value not in supported:
            self.fail(name, f"{value!r} is not supported; expected {' or '.join(map(repr, supported))}")
