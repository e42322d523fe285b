"""`longspan check`: what it sums up, and every kind of mistake it finds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from app import errors
from app.check import check
from app.config import EMBEDDED_MODEL
from app.serving.placement import Node
from tests.test_cli import run

# Ray's own schema module uses a pydantic feature that is on its way out.
pytestmark = pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "serve_configs").glob("*.yaml"))
LOCAL = ROOT / "serve_configs" / "local.yaml"


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
    assert "short: float32, 5120 bytes of cache per token, 10 blocks = 640 tokens and no longer sequence; 1 x" in out
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
        (
            lambda d: application(d, "router")["args"].update(versions=[{"app": "router"}]),
            "application router: args.versions.0.app: 'router' is a router",
        ),
        (
            lambda d: application(d, "router")["args"].update(settings={"weights": {"pool": 1}}),
            "application router: args.settings.weights: 'pool' is no application of `versions`, which are pools",
        ),
        (
            lambda d: application(d, "router").update(
                deployments=[{"name": "router", "user_config": {"weights": {"pools": 0}}}]
            ),
            "application router: deployments.0.user_config.weights: at least one must be above 0",
        ),
        (
            lambda d: application(d, "pools").update(deployments=[{"name": "shrot"}]),
            "application pools: deployments.0.name: must be one of short, long, monitor, got 'shrot'",
        ),
        (
            lambda d: pools(d)["short"]["engine"].update(device="cuda"),
            "application pools: args.short.num_gpus: engine.device cuda needs a GPU",
        ),
        (
            lambda d: pools(d)["short"]["engine"].update(kernel_backend="triton"),
            "application pools: args.short.engine.kernel_backend: triton does not run on a CPU",
        ),
        (
            lambda d: pools(d)["short"].update(num_gpus=1, engine={"kernel_backend": "torch"}),
            "application pools: args.short.engine.kernel_backend: torch does not run on a GPU",
        ),
        (
            lambda d: pools(d)["short"]["engine"].update(tuning_table="/absent.json"),
            "application pools: args.short.engine.tuning_table: ",
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


def test_router_and_pools_must_have_one_tokenizer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED_MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))

    def edit(document: dict[str, Any]) -> None:
        model = {"path": str(tmp_path / "model")}
        application(document, "router")["args"]["versions"] = [{"app": "pools", "model": model}]

    assert run(capsys, "check", str(edited(tmp_path, edit)))[0] == 0
    with (tmp_path / "model" / "chat_template.jinja").open("a", encoding="utf-8") as template:
        template.write("{# another #}")
    code, _, err = run(capsys, "check", str(edited(tmp_path, edit)))
    assert code == 2 and "application router: args.versions.0.model.path: has another tokenizer" in err
    (tmp_path / "model" / "tokenizer.json").unlink()
    code, _, err = run(capsys, "check", str(edited(tmp_path, edit)))
    assert code == 3 and "tokenizer.json" in err


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
