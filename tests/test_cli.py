"""The `longspan` command: exit codes, one-line errors, `check`, and `bench` against a local server."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from app import cli, errors
from app.bench import command
from app.bench.scenarios import SCENARIOS, ScenarioOptions, summary_line
from app.check import check
from app.config import EMBEDDED_MODEL
from app.serving.placement import Node
from tests.bench.sse_server import SseServer, serving

# Ray's own schema module uses a pydantic feature that is on its way out.
pytestmark = pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "serve_configs").glob("*.yaml"))
LOCAL = ROOT / "serve_configs" / "local.yaml"


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


# ---- check ----


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_pass(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setenv("MODEL", "embedded")
    code, out, err = run(capsys, "check", str(path))
    assert (code, err) == (0, "")
    assert "router" in out


def test_the_summary_adds_up(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def edit(document: dict[str, Any]) -> None:
        pools(document)["short"]["engine"]["cache_blocks"] = 10

    code, out, _ = run(capsys, "check", str(edited(tmp_path, edit)))
    assert code == 0
    # 8 layers x (128 + 32) values x 4 bytes; blocks of 64 tokens.
    assert "short: float32, 5120 bytes of cache per token, 10 blocks = 640 tokens; 1 x (0.5 CPUs)" in out
    assert "8 layers, context 16384" in out


def test_ranks_are_summed_up_and_compared_with_the_cluster(tmp_path: Path) -> None:
    def edit(document: dict[str, Any]) -> None:
        pools(document)["short"] |= {"parallel": {"tensor": 2}, "num_cpus": 1.0, "num_gpus": 1.0}

    path = edited(tmp_path, edit)
    gpu = Node("n1", {"CPU": 2.0, "GPU": 2.0}, {})
    summary = check(path, [gpu, Node("n2", {"CPU": 2.0}, {})])
    assert "tokens on each of 2 ranks; 1 x (2 bundles of 1 CPU, 1 GPU on one node)" in summary
    assert summary.endswith("the cluster has room for all 3 replicas")
    with pytest.raises(errors.PreflightError, match=r"router asks 0\.2 CPU; the cluster has n1: 2 CPU, 2 GPU"):
        check(path, [gpu, Node("n2", {"CPU": 0.5}, {})])
    with pytest.raises(errors.PreflightError, match="short asks 2 bundles of 1 CPU, 1 GPU on one node; the cluster"):
        check(path, [Node("n1", {"CPU": 8.0, "GPU": 1.0}, {})] * 2)


def pools(document: dict[str, Any]) -> dict[str, Any]:
    return application(document, "pools").setdefault("args", {})  # type: ignore[no-any-return]


def application(document: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in document["applications"] if each["name"] == name)  # type: ignore[no-any-return]


def edited(folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    document = yaml.safe_load(LOCAL.read_text())
    edit(document)
    path = folder / "edited.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda d: pools(d)["short"]["engine"].update(max_num_seqs=0),
            "application pools: args.short.engine.max_num_seqs: ",
        ),
        (
            lambda d: pools(d)["long"].update(parallel={"tensor": 5}),
            "application pools: args.long.parallel.tensor: 5 does not divide the model's",
        ),
        (lambda d: pools(d)["long"].update(engin={}), "application pools: args.long.engin: "),
        (
            lambda d: pools(d)["long"]["engine"].update(max_num_seqs=9000),
            "application pools: args.long.engine.max_num_seqs: ",
        ),
        (
            lambda d: pools(d)["short"]["engine"].update(max_model_len=20_000),
            "application pools: args.short.engine.max_model_len: 20000 exceeds the model's context of 16384",
        ),
        (
            lambda d: pools(d)["long"]["engine"].update(max_model_len=2048),
            "application pools: args.short.engine.max_model_len: 4096 exceeds the long pool's 2048",
        ),
        (
            lambda d: application(d, "router")["args"].update(settings={"short_max_cost_tokens": 16_385}),
            "application router: args.settings.short_max_cost_tokens: 16385 exceeds the context",
        ),
        (
            lambda d: application(d, "router").update(
                deployments=[{"name": "router", "user_config": {"short_max_cost_tokens": 5000}}]
            ),
            "application router: deployments.0.user_config.short_max_cost_tokens: 5000 exceeds max_model_len 4096",
        ),
        (
            lambda d: pools(d).update(scaling={"short": {"min_replicas": 3, "max_replicas": 2}}),
            "application pools: args.scaling.short.max_replicas: must be at least min_replicas",
        ),
        (
            lambda d: pools(d).update(scaling={"short": {}, "budget": 0.5}),
            "application pools: args.scaling.budget: must be at least 1",
        ),
        (
            lambda d: pools(d).update(scaling={"short": {"max_replicas": 2}}),
            "application pools: autoscaling_policy.policy_function: must be app.serving.autoscaling:PoolsPolicy",
        ),
        (
            lambda d: application(d, "pools").update(
                deployments=[{"name": "monitor", "user_config": {"short": {"max_step": 0}}}]
            ),
            "application pools: deployments.0.user_config.short.max_step: ",
        ),
        (
            lambda d: application(d, "pools").update(
                deployments=[{"name": "long"}, {"name": "monitor", "user_config": {"short": {"max_replicas": 2}}}]
            ),
            "application pools: deployments.1.user_config.short: has no effect: the pool's number is fixed",
        ),
        (
            lambda d: (
                pools(d).update(scaling={"short": {}}),
                application(d, "pools").update(
                    autoscaling_policy={"policy_function": "app.serving.autoscaling:PoolsPolicy"},
                    deployments=[{"name": "monitor", "user_config": {"short": {}, "long": {}}}],
                ),
            ),
            "application pools: deployments.0.user_config.long: has no effect: the pool's number is fixed",
        ),
        (
            lambda d: application(d, "pools").update(
                deployments=[{"name": "monitor", "user_config": {"budget": 4}}]
            ),
            "application pools: deployments.0.user_config.budget: has no effect",
        ),
        (
            lambda d: pools(d).update(model={"path": "${LONGSPAN_UNSET}"}),
            "application pools: args.model.path: the environment",
        ),
        (lambda d: application(d, "pools").update(args=[1]), "args"),
        (
            lambda d: application(d, "router").update(deployments=[{"name": "router", "user_config": {"weight": {}}}]),
            "application router: deployments.0.user_config.weight: ",
        ),
        (
            lambda d: application(d, "pools").update(
                deployments=[{"name": "monitor"}, {"name": "long", "user_config": {"watchdog_timeout_s": -1}}]
            ),
            "application pools: deployments.1.user_config.watchdog_timeout_s: ",
        ),
        (
            lambda d: application(d, "router")["args"].update(versions=[{"app": "pools"}, {"app": "other"}]),
            "application router: args.versions.1.app: the file has no application 'other'",
        ),
        (lambda d: d.update(applications=[{"name": "x", "import_path": "a:b"}]), "no application has the import_path"),
        (lambda d: d.pop("applications"), "applications: "),
    ],
)  # fmt: skip
def test_broken_configs_name_file_application_and_field(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    path = edited(tmp_path, edit)
    code, out, err = run(capsys, "check", str(path))
    assert (code, out) == (2, "")
    assert err.startswith(f"longspan: {path}: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("text", [None, "a: [", "\xff", "[]"], ids=["absent", "syntax", "encoding", "list"])
def test_unreadable_files(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "x.yaml"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    code, _, err = run(capsys, "check", str(path))
    assert code == 2
    assert err.startswith(f"longspan: {path}: ")
    assert err.count("\n") == 1


def test_unusable_checkpoints_exit_with_3(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, folder)
    path = edited(tmp_path, lambda d: pools(d).update(model={"path": str(folder)}))
    assert run(capsys, "check", str(path))[0] == 0
    next(iter(folder.glob("*.safetensors"))).unlink()
    assert run(capsys, "check", str(path))[0] == 3
    random = edited(tmp_path, lambda d: pools(d).update(model={"path": str(folder), "weights": "random"}))
    assert run(capsys, "check", str(random))[0] == 0
    (folder / "config.json").unlink()
    code, _, err = run(capsys, "check", str(path))
    assert code == 3
    assert "config.json" in err
    path = edited(tmp_path, lambda d: pools(d).update(model={"digest": "0" * 64}))
    code, _, err = run(capsys, "check", str(path))
    assert code == 3
    assert "digest" in err


def test_a_cache_without_a_block_exits_with_4(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = edited(tmp_path, lambda d: pools(d)["short"]["engine"].update(cache_memory_bytes=1000))
    code, _, err = run(capsys, "check", str(path))
    assert code == 4
    assert "args.short.engine.cache_memory_bytes" in err


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
