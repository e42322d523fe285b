"""Launch tables: what is shipped, look-up, fallback, malformed files; and the search that fills them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import tune, tuning

CPU = torch.device("cpu")
GATHER = {"tokens": 8, "num_warps": 2}


@pytest.fixture(autouse=True)
def _shipped_tables() -> Iterator[None]:
    yield
    tuning.use(None)


def table(entries: list[dict[str, Any]], kernel: str = "gather_blocks", card: str = "a card") -> dict[str, Any]:
    return {"card": card, "kernels": {kernel: entries}}


@pytest.mark.parametrize("path", sorted(tuning.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_tables_are_well_formed_and_named_after_their_card(path: Path) -> None:
    read = tuning.Table.read(path)
    assert path.name in (tuning.DEFAULT_FILE, tuning.file_name(read.card))


def test_the_default_answers_every_call() -> None:
    table = tuning.Table.read(tuning.FOLDER / tuning.DEFAULT_FILE)
    for kernel, facts in tuning.FACTS.items():
        assert table.find(kernel, dict.fromkeys(facts, 1e9)) is not None, kernel


def test_bounds_choose_the_first_entry_that_fits() -> None:
    read = tuning.Table.read(tuning.FOLDER / "NVIDIA_H200.json")
    rows = [
        read.find("fused_experts", {"bits": 16, "rows_per_expert": rows, "dim": 1, "inter": 1})
        for rows in (4, 4.1, 96, 400, 1e6)
    ]
    assert [use["gate_up"]["columns"] for use in rows if use] == [64, 128, 64, 128, 128]
    assert read.find("fused_experts", {"bits": 32, "rows_per_expert": 1, "dim": 1, "inter": 1}) is None


def test_a_table_in_use_comes_first_and_the_default_fills_its_gaps() -> None:
    before = tuning.find("gather_blocks", CPU, row_bytes=64)
    tuning.use(tuning.Table.of(table([{"up_to": {"row_bytes": 100}, "use": GATHER}])))
    assert tuning.find("gather_blocks", CPU, row_bytes=100) == GATHER
    assert tuning.find("gather_blocks", CPU, row_bytes=101) == before
    assert tuning.find("mla_prefill", CPU, bits=32)["queries"] == 16
    tuning.use(None)
    assert tuning.find("gather_blocks", CPU, row_bytes=64) == before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "expected an object with the name of a card"),
        ({"card": "x"}, "kernels: expected an object"),
        (table([], kernel="mystery"), "mystery: is no tuned kernel"),
        ({"card": "x", "kernels": {"gather_blocks": {}}}, "gather_blocks: expected a list"),
        (table([{"use": GATHER}]), r"gather_blocks\[0\]: expected an object of up_to and use"),
        (table([{"up_to": {"tokens": 3}, "use": GATHER}]), r"\[0\].up_to: expected an object of row_bytes"),
        (table([{"up_to": {}, "use": {"tokens": 8}}]), "use: expected tokens, num_warps"),
        (table([{"up_to": {}, "use": GATHER | {"tokens": "8"}}]), "use.tokens: expected a positive number, got '8'"),
        (table([{"up_to": {}, "use": {"rows": 16, "gate_up": {"columns": 1}, "down": {}}}], "fused_experts"),
         "use.(down|gate_up): expected an object of columns, depth"),
    ],
)  # fmt: skip
def test_a_malformed_table_names_file_and_place(values: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message) as error:
        tuning.Table.read(path)
    assert str(path) in str(error.value)


def test_a_truncated_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    path.write_text('{"card": ')
    with pytest.raises(ValueError, match=r"card\.json: is no JSON"):
        tuning.Table.read(path)


def test_search_finds_the_best_of_separable_settings() -> None:
    calls = []

    def measure(config: tuning.Config) -> float:
        calls.append(dict(config))
        if config["b"] == 5:
            return float("inf")  # does not fit the card
        return 10.0 + abs(config["a"] - 3) + abs(config["b"] - 6)

    best, time = tune.search({"a": 1, "b": 1}, {"a": (1, 2, 3, 4), "b": (1, 5, 6, 7)}, measure)
    assert (best, time) == ({"a": 3, "b": 6}, 10.0)
    assert len(calls) <= 20


def test_search_refuses_a_start_that_does_not_run() -> None:
    with pytest.raises(ValueError, match="does not run"):
        tune.search({"a": 1}, {"a": (1, 2)}, lambda config: float("inf"))


def test_every_axis_is_a_setting() -> None:
    assert tune.AXES.keys() == tuning.FACTS.keys()
    for kernel, axes in tune.AXES.items():
        use = tuning.find(kernel, CPU, **dict.fromkeys(tuning.FACTS[kernel], 1.0))
        for name, values in axes.items():
            for value in values:
                tuning.Table.of(table([{"up_to": {}, "use": dict(use) | {name: value}}], kernel))


def test_a_written_table_is_read_back_and_extended(tmp_path: Path) -> None:
    path = tmp_path / "new.json"
    tune.write_table(path, "a card", "gather_blocks", [{"up_to": {}, "use": GATHER}], "today")
    prefill = {"queries": 64, "keys": 32, "num_warps": 4, "num_stages": 2}
    tune.write_table(path, "a card", "mla_prefill", [{"up_to": {"bits": 16}, "use": prefill}], "today")
    read = tuning.Table.read(path)
    assert read.find("gather_blocks", {"row_bytes": 5}) == GATHER
    assert read.find("mla_prefill", {"bits": 16}) == prefill
    with pytest.raises(ValueError, match="is a table of a card, this is another"):
        tune.write_table(path, "another", "gather_blocks", [], "today")


def test_without_a_card_the_command_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kernels.tune", "--kernel", "gather_blocks", "--out", str(tmp_path / "t.json")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1 and "no CUDA device" in done.stderr
    assert not (tmp_path / "t.json").exists()
