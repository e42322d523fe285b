"""Every file in serve_configs/ is valid for Serve and builds; what is wrong in `args` is refused by its path."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve import Application
from ray.serve.schema import ServeDeploySchema

from app.errors import ConfigError
from app.main import pools, router

CONFIGS = sorted((Path(__file__).parents[1] / "serve_configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_serve_config_builds(path: Path) -> None:
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
        (pools, {"model": {"path": "${LONGSPAN_NO_SUCH_VARIABLE}"}}, "model.path"),
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
