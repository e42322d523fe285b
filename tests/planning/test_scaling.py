"""`longspan plan scaling`: a config's pools under a trace."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from app import cli
from app.errors import ConfigError
from app.planning.scaling import read_scenario
from app.planning.trace import LengthClass, poisson, step

ROOT = Path(__file__).parents[2]
AUTOSCALE, LOCAL = ROOT / "serve_configs" / "autoscale.yaml", ROOT / "serve_configs" / "local.yaml"
SPEED = "start_delay_s=20,prefill_tokens_per_s=3000,step_base_s=0.01,decode_seq_s=0.001"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten minutes of shorts, at 2 and then at 8 a second, of which a replica of SPEED takes about 6."""
    requests = poisson(step(2.0, 8.0, 300.0), 600.0, [LengthClass(1.0, 300, 20)], 0)
    lines = [
        {"at_s": one.arrival_s, "prompt_tokens": one.num_prompt_tokens, "output_tokens": one.num_output_tokens}
        for one in requests
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_it_tells_when_pools_scale_and_why(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    assert (
        cli.main(["plan", "scaling", str(AUTOSCALE), "--trace", str(trace), "--short", SPEED, "--json", str(out)]) == 0
    )
    printed = capsys.readouterr().out
    (up, *_) = [line for line in printed.splitlines() if " 1 to  2" in line]
    assert 300 <= float(up.split()[0]) <= 400 and up.split()[1] == "short" and "queue at" in up
    timeline = json.loads(out.read_text())["timeline"]
    assert max(one["short"]["running"] for one in timeline if one["time_s"] < 300) == 1
    assert max(one["short"]["running"] for one in timeline) == 2
    assert {one["long"]["target"] for one in timeline} == {0}
    assert len(json.loads(out.read_text())["requests"]) == len(trace.read_text().splitlines())


def test_the_config_gives_what_it_sets_and_the_options_the_rest() -> None:
    scenario = read_scenario(AUTOSCALE, None, {"short": {"prefill_tokens_per_s": 123.0}})
    assert scenario.scaling.budget == 3
    assert (scenario.scaling.pools["short"].max_replicas, scenario.scaling.pools["long"].min_replicas) == (2, 0)
    assert scenario.pools["short"].cost.prefill_tokens_per_s == 123.0
    assert scenario.pools["long"].cost.max_running_seqs == 4
    assert (scenario.pools["short"].max_model_len, scenario.pools["long"].initial_replicas) == (4096, 0)


def test_pools_of_a_fixed_number_keep_it() -> None:
    scenario = read_scenario(LOCAL, "pools", {})
    assert [(one.min_replicas, one.max_replicas) for one in scenario.scaling.pools.values()] == [(1, 1), (1, 1)]
    assert math.isinf(scenario.scaling.budget)


@pytest.mark.parametrize(
    ("costs", "app", "message"),
    [
        ({"short": {"speed": 1.0}}, None, "--short: speed: is none of start_delay_s"),
        ({"long": {"prefill_tokens_per_s": 0.0}}, None, "--long: prefill_tokens_per_s: must be greater"),
        ({"long": {"kv_capacity_tokens": 1.5}}, None, "--long: kv_capacity_tokens: must be a whole number"),
        ({}, "other", "has no application other"),
    ],
)
def test_what_is_wrong_is_named(costs: dict[str, dict[str, float]], app: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_scenario(AUTOSCALE, app, costs)  # type: ignore[arg-type]


def test_a_file_that_is_no_config_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "no.yaml"
    path.write_text("- 1")
    assert cli.main(["plan", "scaling", str(path), "--trace", str(path)]) == 2
    assert "is not a Serve config" in capsys.readouterr().err
