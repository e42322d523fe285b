"""The error tree: what each class becomes, and that nothing is lost between processes."""

from __future__ import annotations

import inspect
import pickle

import pytest

from app import errors
from app.errors import CheckpointError, ConfigError, ContextLengthError, LongspanError, OverloadedError

CLASSES = [
    member
    for _, member in inspect.getmembers(errors, inspect.isclass)
    if issubclass(member, LongspanError) and member.__module__ == errors.__name__
]


def test_the_tree_in_the_docstring_is_complete() -> None:
    """Each class with the status its line gives; a line without one takes it from its children."""
    lines = {
        words[0]: words[1:] for line in (errors.__doc__ or "").splitlines() if (words := line.strip("│├└─ ").split())
    }
    for cls in CLASSES:
        assert cls.__name__ in lines
        first = lines[cls.__name__][:1]
        if first and first[0].isdigit():
            assert int(first[0]) == cls.status
        if "exit" in lines[cls.__name__]:
            assert f"exit {cls.exit_code}" in " ".join(lines[cls.__name__])


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_pickles(cls: type[LongspanError]) -> None:
    error = cls("what went wrong")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == copy.message == "what went wrong"
    assert vars(copy) == vars(error)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("short.engine.dtype: no such type", field="short.engine.dtype"),
        CheckpointError("missing", file="model-00001.safetensors", tensor="lm_head.weight"),
        ContextLengthError("too long", param="messages"),
        OverloadedError("queue full", retry_after_s=7.5),
    ],
    ids=lambda error: type(error).__name__,
)
def test_attributes_survive_pickling_twice(error: LongspanError) -> None:
    copy = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(error))))
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_checkpoint_errors_start_with_the_place() -> None:
    error = CheckpointError("shape [2] expected", file="a.safetensors", tensor="x.weight")
    assert str(error) == "a.safetensors / x.weight: shape [2] expected"
    assert (error.file, error.tensor) == ("a.safetensors", "x.weight")
    assert str(CheckpointError("no files")) == "no files"
