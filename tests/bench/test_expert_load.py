from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.bench import expert_load
from app.errors import ConfigError
from app.model.placement import ExpertPlacement
from app.protocol import EngineStats
from app.serving.metrics import ReplicaSeries, render

COUNTS = {"1.0": 90, "1.1": 4, "1.2": 3, "1.3": 3, "2.0": 5, "2.1": 5, "2.2": 5, "2.3": 5}


def metrics_of(*counts: dict[str, int]) -> str:
    series = [
        ReplicaSeries(("m", "pools", "short", f"r{index}"), 0.0, EngineStats(expert_tokens=each))
        for index, each in enumerate(counts)
    ]
    return render(series).decode()


def test_loads_are_summed_over_replicas() -> None:
    loads = expert_load.parse_loads(metrics_of(COUNTS, {"1.0": 10, "1.1": 0, "1.2": 0, "1.3": 0}, {}))
    assert loads == {1: [100, 4, 3, 3], 2: [5, 5, 5, 5]}


def answering(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def metrics(url: str) -> str:
        return text

    monkeypatch.setattr(expert_load, "_metrics", metrics)


def test_the_file_evens_out_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(metrics_of(COUNTS), monkeypatch)
    lines: list[str] = []
    path = tmp_path / "placement.json"
    result: dict[str, Any] = expert_load.write_placement("http://x", 2, 2, path, lines.append)
    placement = ExpertPlacement.read(path, 4, 2)
    assert placement.layer(1).ranks_of(0) == [0, 1]
    assert result["layers"][1]["imbalance"] < 1.1 < 1.8 < result["layers"][1]["even_imbalance"]
    assert "1.88 x the mean" in lines[0]


def test_a_server_that_counts_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(metrics_of({}, {"1.0": 0, "1.1": 0}), monkeypatch)
    with pytest.raises(ConfigError, match="http://x/metrics counts no longspan:expert_tokens_total"):
        expert_load.write_placement("http://x", 2, 0, tmp_path / "p.json", print)
