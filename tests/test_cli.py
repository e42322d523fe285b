"""The `longspan` command: exit codes, one-line errors, and `bench` against a local server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from app import cli, errors
from app.bench import command
from app.bench.scenarios import SCENARIOS, ScenarioOptions, summary_line
from tests.bench.sse_server import SseServer, serving

# Ray's own schema module uses a pydantic feature that is on its way out.
pytestmark = pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")

ROOT = Path(__file__).parent.parent


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


# ---- every error ----


def test_expected_errors_are_one_line_and_their_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (
        errors.LongspanError("a\nb"),
        errors.ConfigError("field: wrong\n  here"),
        errors.CheckpointError("is missing", file="x"),
        errors.PreflightError("no device"),
    ):

        def fail(_options: Any, error: errors.LongspanError = error) -> int:
            raise error

        monkeypatch.setattr(cli, "_check", fail)
        code, out, err = run(capsys, "check", "x.yaml")
        assert (code, out) == (error.exit_code, "")
        assert err == f"longspan: {' '.join(error.message.split())}\n"


def test_interrupt_and_usage(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_options: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_check", interrupt)
    assert run(capsys, "check", "x.yaml")[0] == 130
    for arguments in ([], ["bench", "--rate", "-1"], ["bench", "--rate", "1", "--bursts", "1:1"], ["unknown"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 2


@pytest.mark.parametrize(
    "arguments", [["--help"], ["check", "--help"], ["bench", "--help"], ["bench", "scenario", "--help"]]
)
def test_help(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "usage: longspan" in text
    if arguments[-2:] == ["scenario", "--help"]:
        assert all(name in text and summary_line(scenario) in text for name, scenario in SCENARIOS.items())


# ---- bench ----


@contextmanager
def background(server: SseServer) -> Iterator[SseServer]:
    """The local server on a thread of its own, for commands that run their own event loop."""
    loop, started = asyncio.new_event_loop(), threading.Event()
    stop = asyncio.Event()

    async def main() -> None:
        async with serving(server):
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    try:
        assert started.wait(60)
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def test_bench_writes_json_and_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    with background(SseServer()) as server:
        code, out, _ = run(
            capsys, "bench", "--url", server.url, "--rate", "50", "--num-requests", "10", "--prompt-tokens",
            "uniform:5:9", "--output-tokens", "4", "--slo-ttft-ms", "60000", "--json", str(path),
        )  # fmt: skip
    assert code == 0
    assert "10 requests" in out
    document = json.loads(path.read_text())
    assert document["result"]["summary"]["good_share"] == 1.0
    assert [row["output_tokens"] for row in document["result"]["requests"]] == [4] * 10
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert {5, 6, 7, 8, 9} >= {len(body["prompt"]) for body in server.bodies}


def test_bench_replays_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"at_s": 0, "prompt_tokens": 3, "output_tokens": 2}\n{"at_s": 0.1, "prompt_tokens": 6, "output_tokens": 1}\n'
    )
    with background(SseServer()) as server:
        code, _, _ = run(
            capsys,
            "bench",
            "--url",
            server.url,
            "--trace",
            str(trace),
            "--no-stream",
            "--json",
            str(tmp_path / "t.json"),
        )
    assert code == 0
    assert sorted((len(body["prompt"]), body["max_tokens"]) for body in server.bodies) == [(3, 2), (6, 1)]


def test_bench_fails_if_nothing_was_answered(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(
        capsys,
        "bench",
        "--url",
        "http://127.0.0.1:9",
        "--num-requests",
        "2",
        "--rate",
        "100",
        "--json",
        str(tmp_path / "x.json"),
    )
    assert code == 1
    assert "connect x 2" in out


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--rate", "1"], "--duration"),
        (["--ramp", "1:2", "--num-requests", "5"], "--duration"),
        (["--rate", "1", "--duration", "1", "--prompt-tokens", "x"], "--prompt-tokens"),
        (["--compare", "transformers", "--output-tokens", "uniform:1:5"], "--output-tokens"),
        (["scenario", "memory", "--url", "http://x"], "--url"),
    ],
)
def test_bench_arguments_that_need_more(capsys: pytest.CaptureFixture[str], arguments: list[str], field: str) -> None:
    code, _, err = run(capsys, "bench", *arguments)
    assert code == 2
    assert err.startswith(f"longspan: {field}")


def test_a_failed_scenario_exits_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for passed in (True, False):

        def scenario(_options: ScenarioOptions, passed: bool = passed) -> dict[str, Any]:
            """Measures nothing."""
            return {"passed": passed}

        monkeypatch.setitem(SCENARIOS, "memory", scenario)
        code, out, _ = run(capsys, "bench", "scenario", "memory", "--json", str(tmp_path / "m.json"))
        assert code == (0 if passed else 1)
        assert ("passed" if passed else "FAILED") in out


def test_progress_is_a_line_now_and_then_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for second in range(1, 15):
        command._show_progress(command.Progress(second + 0.02, 10, 5, 3, 1, 12.0))
    assert capsys.readouterr().err == "  10.0 s  sent 5/10  in flight 2  done 2  failed 1  12 events/s\n"
