"""The JSON file, the table and the plot of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from app.bench import report
from app.bench.load import LoadRun
from app.bench.plot import draw_timeline, in_flight, tokens_per_second
from app.bench.scrape import parse_metrics
from app.bench.summary import Slo, summarize
from app.errors import ConfigError
from tests.bench.sse_server import METRICS
from tests.bench.test_summary import record

RUN = LoadRun(
    [record(0), record(0.5, ttft_s=0.3), record(1.0, error="timeout")],
    [parse_metrics(METRICS, 0.0), parse_metrics(METRICS, 1.0)],
    wall_s=2.0,
    client_cpu_s=0.1,
)


def test_json_says_where_it_was_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    report.write_result(path, "load", {"summary": summarize(RUN, Slo(), []), "gap": math.nan, "samples": RUN.samples})
    document = json.loads(path.read_text())
    assert document["name"] == "load"
    assert document["environment"]["cpus"] >= 1
    assert "torch" in document["environment"]["packages"]
    assert document["result"]["gap"] is None
    assert document["result"]["summary"]["errors"] == {"timeout": 1}
    assert document["result"]["samples"][0]["replicas"]["pools/r1"]["free_blocks"] == 25


def test_an_unwritable_file_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^--json: "):
        report.write_result(tmp_path / "file" / "result.json", "load", {})
    with pytest.raises(ConfigError, match=r"^--plot: "):
        draw_timeline(RUN, tmp_path / "file" / "plot.png")


def test_results_go_to_the_ignored_folder_by_default() -> None:
    assert report.result_path("load").parent == Path(".bench")
    assert report.result_path("load", Path("x.json")) == Path("x.json")


def test_table_shows_percentiles_and_errors() -> None:
    table = report.load_table(summarize(RUN, Slo(ttft_s=0.2), [2048]))
    assert "3 requests in 2.0 s: 2 answered" in table
    assert "errors: timeout x 1" in table
    row = next(line for line in table.splitlines() if line.strip().startswith("TTFT"))
    assert [float(cell) for cell in row.split()[1:]] == pytest.approx([200.0, 200.0, 280.0, 290.0, 298.0])
    assert "warning" not in table


def test_a_slow_client_is_told() -> None:
    late = record(0)
    late.sent_s = 0.5
    summary = summarize(LoadRun([late], [], wall_s=1.0, client_cpu_s=0.1), Slo(), [])
    assert "500 ms late" in (report.client_warning(summary) or "")
    busy = summarize(LoadRun([record(0)], [], wall_s=1.0, client_cpu_s=0.95), Slo(), [])
    assert "95% of a core" in (report.client_warning(busy) or "")


def test_curves() -> None:
    times, counts = in_flight(RUN.records)
    assert times == sorted(times)
    assert (max(counts), counts[-1]) == (2, 0)
    rates = tokens_per_second(RUN.records, RUN.wall_s)
    assert len(rates) == 2
    assert sum(rates) == pytest.approx(33)


@pytest.mark.parametrize("samples", [RUN.samples, []], ids=["metrics", "no-metrics"])
def test_plot_is_a_png(tmp_path: Path, samples: list[object]) -> None:
    path = tmp_path / "plots" / "load.png"
    draw_timeline(LoadRun(RUN.records, samples, RUN.wall_s, 0.1), path)  # type: ignore[arg-type]
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_metrics_of_others_are_passed_over() -> None:
    sample = parse_metrics('python_info{x="1"} 1.0\nlongspan:broken\n' + METRICS, 3.0)
    assert set(sample.replicas) == {"pools/r1", "pools/r2", "pools/r3"}
    assert sample.kv_usage("absent") == 0.0
