"""The configuration: defaults, refusals by dotted path, ${VAR}."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from app.config import (
    EMBEDDED_MODEL,
    FrozenModel,
    ParallelConfig,
    PoolsConfig,
    RouterConfig,
    RouterSettings,
    load_config,
)
from app.errors import ConfigError


def test_nothing_but_defaults_is_needed() -> None:
    pools = load_config(PoolsConfig, {})
    assert pools == PoolsConfig()
    assert pools.model.folder == EMBEDDED_MODEL
    assert (EMBEDDED_MODEL / "config.json").is_file()
    assert [version.app for version in load_config(RouterConfig, {}).versions] == ["pools"]


@pytest.mark.parametrize(
    ("cls", "values", "field"),
    [
        (PoolsConfig, {"sort": {}}, "sort"),
        (PoolsConfig, {"short": {"engine": {"max_num_seqs": 0}}}, "short.engine.max_num_seqs"),
        (PoolsConfig, {"short": {"engine": {"max_num_seqs": -3}}}, "short.engine.max_num_seqs"),
        (PoolsConfig, {"short": {"engine": {"max_num_seqs": "many"}}}, "short.engine.max_num_seqs"),
        (PoolsConfig, {"long": {"engine": {"device": "tpu"}}}, "long.engine.device"),
        (PoolsConfig, {"long": {"engine": {"max_seqs": 4}}}, "long.engine.max_seqs"),
        (PoolsConfig, {"long": {"num_cpus": -1}}, "long.num_cpus"),
        (PoolsConfig, {"long": {"graceful_shutdown_timeout_s": float("inf")}}, "long.graceful_shutdown_timeout_s"),
        (PoolsConfig, {"model": {"path": 3}}, "model.path"),
        (PoolsConfig, {"model": "embedded"}, "model"),
        (RouterConfig, {"versions": [{"app": "a"}, {"name": "b"}]}, "versions.1.app"),
        (RouterConfig, {"settings": {"weights": {"pools": -1}}}, "settings.weights.pools"),
        (RouterConfig, {"settings": {"weights": {"pools": float("nan")}}}, "settings.weights.pools"),
        (RouterConfig, {"settings": {"weights": {"pool": 1.0}}}, "settings.weights"),
        (RouterConfig, {"settings": {"weights": {"pools": 0.0}}}, "settings.weights"),
        (RouterConfig, {"max_body_bytes": 1.5}, "max_body_bytes"),
        (RouterConfig, {"settings": {"short": {"max_waiting_seqs": 0}}}, "settings.short.max_waiting_seqs"),
        (RouterConfig, {"settings": {"long": {"max_ttft_s": float("inf")}}}, "settings.long.max_ttft_s"),
        (RouterConfig, {"settings": {"spill_bound_s": -0.1}}, "settings.spill_bound_s"),
        (RouterConfig, {"settings": {"spill_bound_s": float("inf")}}, "settings.spill_bound_s"),
        (RouterConfig, {"settings": {"max_retries": 11}}, "settings.max_retries"),
        (RouterConfig, {"settings": {"max_hold_s": float("nan")}}, "settings.max_hold_s"),
        (PoolsConfig, {"short": {"engine": {"max_passed_over_s": 0}}}, "short.engine.max_passed_over_s"),
        (PoolsConfig, {"scaling": {"short": {"min_replicas": -1}}}, "scaling.short.min_replicas"),
        (PoolsConfig, {"scaling": {"short": {"min_replicas": 3, "max_replicas": 2}}}, "scaling.short.max_replicas"),
        (PoolsConfig, {"scaling": {"long": {"max_replicas": 0}}}, "scaling.long.max_replicas"),
        (PoolsConfig, {"scaling": {"long": {"up_window_s": 0}}}, "scaling.long.up_window_s"),
        (PoolsConfig, {"scaling": {"short": {}, "long": {"replica_cost": 4}, "budget": 4.5}}, "scaling.budget"),
        (PoolsConfig, {"short": {"num_replicas": 2}, "scaling": {"short": {}}}, "short.num_replicas"),
        (PoolsConfig, {"short": {"engine": {"max_num_seqs": 9, "max_batched_tokens": 8}}}, "short.engine.max_num_seqs"),
    ],
)
def test_a_bad_value_names_its_path(cls: type[FrozenModel], values: dict[str, Any], field: str) -> None:
    for where, path in (("", field), ("args", f"args.{field}")):
        with pytest.raises(ConfigError) as caught:
            load_config(cls, values, where=where)
        assert caught.value.field == path
        assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (
            PoolsConfig,
            {"short": {"engine": {"max_num_seqs": 9, "max_batched_tokens": 8}}},
            "short.engine.max_num_seqs: ",
        ),
        (RouterConfig, {"versions": []}, "versions: at least one"),
        (RouterConfig, {"versions": [{"app": "a"}, {"app": "a"}]}, "versions: each application once"),
    ],
)
def test_values_that_contradict_each_other(cls: type[FrozenModel], values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        load_config(cls, values)


def test_variables_are_expanded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELS", "/srv/models")
    monkeypatch.setenv("NAME", "${MODELS}")
    pools = load_config(PoolsConfig, {"model": {"path": "${MODELS}/tiny-${NAME}", "name": "$MODELS"}})
    assert pools.model.folder == Path("/srv/models/tiny-${MODELS}")
    assert pools.model.name == "$MODELS"


def test_variables_in_lists_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APP", "blue")
    monkeypatch.setenv("LIMIT", "12")
    router = load_config(
        RouterConfig, {"versions": [{"app": "${APP}"}], "settings": {"max_ongoing_requests": "${LIMIT}"}}
    )
    assert router.versions[0].app == "blue"
    assert router.settings.max_ongoing_requests == 12


def test_an_unset_variable_names_path_and_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    with pytest.raises(ConfigError, match=r"^args\.versions\.0\.model\.path: .*NOWHERE") as caught:
        load_config(RouterConfig, {"versions": [{"app": "a", "model": {"path": "${NOWHERE}"}}]}, where="args")
    assert caught.value.field == "args.versions.0.model.path"


def test_configuration_cannot_be_changed() -> None:
    settings = RouterSettings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.max_ongoing_requests = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "strategy", "bundles"),
    [
        ({}, "STRICT_PACK", 1),
        ({"tensor": 4}, "STRICT_PACK", 4),
        ({"expert": 4}, "PACK", 4),
        ({"tensor": 2, "expert": 4}, "PACK", 4),
        ({"tensor": 2, "expert": 4, "strategy": "SPREAD"}, "SPREAD", 4),
        ({"tensor": 2, "expert": 4, "strategy": "STRICT_PACK"}, "STRICT_PACK", 8),
        ({"tensor": 4, "strategy": "SPREAD"}, "SPREAD", 1),
    ],
)
def test_a_tensor_group_never_leaves_its_node(values: dict[str, Any], strategy: str, bundles: int) -> None:
    parallel = ParallelConfig(**values)
    assert (parallel.placement_strategy, parallel.num_bundles) == (strategy, bundles)
    assert parallel.num_ranks == parallel.tensor * parallel.expert == bundles * parallel.ranks_per_bundle
    assert strategy == "STRICT_PACK" or parallel.ranks_per_bundle == parallel.tensor


def test_bundle_labels_are_one_for_all_or_one_for_each() -> None:
    labels = ({"ray.io/accelerator-type": "H200"},)
    for count in (1, 2):
        assert ParallelConfig(expert=2, bundle_labels=labels * count).num_bundles == 2
    with pytest.raises(ValidationError, match="one for each of 2 bundles"):
        ParallelConfig(expert=2, bundle_labels=labels * 3)
