"""What README.md names exists, and its commands run; those that need a server in tests/cluster/test_readme.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from app.cli import main
from app.config import EMBEDDED_MODEL

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAX_LINES = 200


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def commands() -> list[str]:
    """The commands of all `sh` blocks; a quoted argument may span lines."""
    return [block.strip() for block in blocks("sh")]


def test_it_is_short_enough_to_read() -> None:
    assert len(README.splitlines()) <= MAX_LINES


def test_paths_exist() -> None:
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL))
    paths = [span for span in spans if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", span) and ("/" in span or "." in span)]
    paths = [path for path in paths if path.split("/")[0] in {"app", "kernels", "tests", "serve_configs", "LICENSE"}]
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert len(paths) > 15
    assert links
    for path in [*paths, *links]:
        assert (ROOT / path).exists(), path


def test_modules_in_the_diagram_exist() -> None:
    diagram = blocks("")[0]
    names = re.findall(r"[\w/]+\.py\b|\b(?:model|kernels|cache)/", diagram)
    assert len(names) > 10
    folders = [ROOT, ROOT / "app", ROOT / "app/serving", ROOT / "app/engine"]
    for name in names:
        assert any((folder / name).exists() for folder in folders), name


def test_functions_exist() -> None:
    for name, path in re.findall(r"`(?:\w+\.)?(\w+)` in\s+`([\w/]+\.py)`", README):
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")


def test_every_command_is_known_to_a_test() -> None:
    """A new command needs a test that runs it: here, or on a server in tests/cluster/test_readme.py."""
    kinds = ("make ", "curl ", ".venv/bin/longspan check ", ".venv/bin/longspan bench ")
    assert len(commands()) >= 5
    assert [command for command in commands() if not command.startswith(kinds)] == []


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z-]+)", README))))
def test_make_targets_exist(target: str) -> None:
    result = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_make_run_serves_the_file_the_readme_says() -> None:
    recipe = subprocess.run(
        ["make", "-n", "--no-print-directory", "run"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert recipe.splitlines()[-1].endswith("serve run serve_configs/local.yaml")


def test_longspan_check() -> None:
    found = [command.split() for command in commands() if " check " in command]
    assert found
    for command in found:
        installed = ROOT / command[0]
        program = [str(installed)] if installed.exists() else [sys.executable, "-m", "app.cli"]
        result = subprocess.run([*program, *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert "longspan-tiny" in result.stdout


def test_the_configuration_for_an_own_checkpoint_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks("yaml")
    assert {app["import_path"] for app in yaml.safe_load(block)["applications"]} == {
        "app.main:router",
        "app.main:pools",
    }
    (tmp_path / "own.yaml").write_text(block, encoding="utf-8")
    monkeypatch.setenv("MODEL_DIR", str(EMBEDDED_MODEL))
    assert main(["check", str(tmp_path / "own.yaml")]) == 0
