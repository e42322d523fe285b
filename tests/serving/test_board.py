"""Decisions survive the way through the control store."""

from __future__ import annotations

import pytest

from app.serving import board
from app.serving.board import PoolDecision


def test_what_is_posted_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    store: dict[tuple[bytes, str], bytes] = {}

    def put(key: bytes, value: bytes, *, overwrite: bool, namespace: str) -> bool:
        assert overwrite
        store[key, namespace] = value
        return True

    monkeypatch.setattr(board, "_put", put)
    monkeypatch.setattr(board, "_get", lambda key, *, namespace: store.get((key, namespace)))
    assert board.read("pools") is None
    decision = PoolDecision(1, 2, wanted=3, granted=2, reasons=("because", "also"), values={"backlog": 1.5})
    board.post("pools", 7.5, {"short": decision})
    assert board.read("pools") == (7.5, {"short": decision})
    board.post("pools", 8.5, {})
    assert board.read("pools") == (8.5, {})
    assert board.read("other") is None
