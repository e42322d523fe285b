"""Every file in serve_configs/ is valid for Serve and builds; what is wrong in `args` is refused by its path."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve import Application
from ray.serve.schema import ServeDeploySchema

from app.config import EMBEDDED_MODEL
from app.errors import ConfigError
from app.main import pools, router

CONFIGS = sorted((Path(__file__).parents[1] / "serve_configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_serve_config_builds(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", str(EMBEDDED_MODEL))
    schema = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    assert schema.http_options.host == "127.0.0.1" or path.name != "local.yaml"
    names = {application.name for application in schema.applications}
    for application in schema.applications:
        module, _, builder = application.import_path.partition(":")
        built = getattr(importlib.import_module(module), builder)(application.args)
        assert isinstance(built, Application)
        if builder == "router":
            assert {version["app"] for version in application.args.get("versions", [{"app": "pools"}])} <= names


@pytest.mark.parametrize(
    ("builder", "args", "field"),
    [
        (pools, {"short": {"engine": {"max_num_seq": 3}}}, "short.engine.max_num_seq"),
        (pools, {"long": {"num_replicas": 0}}, "long.num_replicas"),
        (pools, {"long": {"num_gpus": 0.5, "parallel": {"tensor": 2}}}, "long.num_gpus"),
        (pools, {"model": {"path": "${LONGSPAN_NO_SUCH_VARIABLE}"}}, "model.path"),
        (pools, {"short": {"engine": {"max_model_len": 20_000}}}, "short.engine.max_model_len"),
        (pools, {"long": {"engine": {"max_model_len": 16_385}}}, "long.engine.max_model_len"),
        (pools, {"long": {"engine": {"max_model_len": 4096}}}, "short.engine.max_model_len"),
        (pools, {"scaling": {"short": {"min_replicas": 3, "max_replicas": 2}}}, "scaling.short.max_replicas"),
        (pools, {"scaling": {"short": {}, "long": {}, "budget": 1.5}}, "scaling.budget"),
        (router, {"settings": {"short_max_cost_tokens": 16_385}}, "settings.short_max_cost_tokens"),
        (router, {"versions": [{"app": "a", "wieght": 1}]}, "versions.0.wieght"),
        (router, {"settings": {"short_max_cost_tokens": "many"}}, "settings.short_max_cost_tokens"),
    ],
)
def test_wrong_args_are_refused_by_path(builder: Any, args: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        builder(args)
    assert caught.value.field == field


def test_variables_are_expanded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSPAN_TEST_MODELS", "/models/${NOT_AGAIN}")
    assert isinstance(pools({"model": {"path": "${LONGSPAN_TEST_MODELS}/x"}}), Application)


def test_a_model_folder_that_only_the_replicas_nodes_have_is_not_judged_here() -> None:
    there = {"path": "/no/such/folder"}
    assert isinstance(pools({"model": there, "short": {"engine": {"max_model_len": 100_000}}}), Application)
    settings = {"short_max_cost_tokens": 100_000}
    assert isinstance(router({"versions": [{"app": "a", "model": there}], "settings": settings}), Application)


def test_only_pools_with_scaling_settings_scale() -> None:
    built = pools({"long": {"num_replicas": 3}, "scaling": {"short": {"min_replicas": 0, "max_replicas": 4}}})
    monitor: Any = built._bound_deployment
    short, long = (bound._bound_deployment for bound in monitor.init_args)
    assert (long.num_replicas, long._deployment_config.autoscaling_config) == (3, None)
    serve_bounds = short._deployment_config.autoscaling_config
    assert serve_bounds.min_replicas == 0 and serve_bounds.max_replicas > 4  # the policy keeps to ours
    assert monitor._deployment_config.autoscaling_config.max_replicas == 1
    fixed: Any = pools({})._bound_deployment
    assert fixed._deployment_config.autoscaling_config is None
