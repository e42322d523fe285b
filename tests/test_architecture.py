"""The shape of the code: what lies where, who imports whom, how long files are, and what is public."""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import kernels
from app.config import EMBEDDED_MODEL
from app.engine.engine import Engine

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# Folders at the top that may hold code, and files beside them.
TOP_LEVEL = {
    *{"app", "kernels", "serve_configs", "tests", ".ci", "cluster.yaml", "Makefile", "pyproject.toml"},
    *{"README.md", "LICENSE", "constraints.txt", ".gitignore"},
}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
LONG_FILES: dict[str, str] = {}  # path: why it is not split
_ONE_PROGRAM = "one device program: its parts would hand each other every tile, pointer and stride"
LONG_FUNCTIONS = {  # path:name: why it is not split
    "kernels/mla_decode.py:_decode_kernel": _ONE_PROGRAM,
    "kernels/mla_decode_hopper.py:_decode_kernel": _ONE_PROGRAM,
    "kernels/mla_prefill.py:_prefill_kernel": _ONE_PROGRAM,
    "kernels/mla_prefill_hopper.py:_consume": _ONE_PROGRAM,
}

ENGINE_METHODS = {
    *{"start", "stop", "step", "has_work", "validate", "add", "generate", "abort", "warm_up", "fail"},
    *{"stats", "check_health", "reset", "check_integrity"},
}
KERNELS = {
    "blocks": {"gather_blocks", "copy_blocks"},
    "fp8_experts": {"fp8_experts"},
    "expert_placement": {"place_experts"},
    "expert_routing": {"route_experts"},
    "fused_experts": {"fused_experts"},
    "head_projection": {"project_heads"},
    "mla_decode": {"mla_decode"},
    "mla_prefill": {"mla_prefill"},
    "mla_rope_cache": {"mla_rope_cache"},
    "peer_exchange": {"all_reduce"},
    "row_linear": {"linear_rows"},
    "rms_norm": {"rms_norm", "add_rms_norm"},
    "sampling": {"sample"},
}

# Documented, https://docs.pytorch.org/docs/stable/symmetric_memory.html, under this name only.
UNDERSCORED = {"torch.distributed._symmetric_memory"}

BELOW_SERVING = ["app.config", "app.errors", "app.protocol", "app.tokenizer"]


def tracked_files() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_nothing_else_lies_at_the_top() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in tracked_files()} <= TOP_LEVEL


def test_import_contracts() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_module_of_app_has_a_layer() -> None:
    layers = PYPROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
    placed = {name.strip() for layer in layers for name in re.split(r"[|:()]", layer)}
    found = {f"app.{path.stem}" for path in (ROOT / "app").glob("*.py") if path.stem != "__init__"}
    found |= {f"app.{path.parent.name}" for path in (ROOT / "app").glob("*/__init__.py")}
    assert found <= placed


def test_kernels_import_only_compilers_and_arrays() -> None:
    for path in sources("kernels"):
        roots = {name.partition(".")[0] for name in imported_modules(parse(path))}
        assert roots - sys.stdlib_module_names <= {"torch", "triton", "numba", "llvmlite", "numpy", "kernels"}, path


def test_engine_and_below_load_neither_ray_nor_http() -> None:
    """By what is really loaded, so that an import inside a function of a third module is seen as well."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sources("app/engine", "app/cache", "app/model", "kernels")
        if path.stem != "__init__"
    ]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*sys.modules)"
    command = [sys.executable, "-c", code, *BELOW_SERVING, *modules]
    loaded = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert {"torch", "kernels", "app.engine.engine"} <= set(loaded)
    assert not {"ray", "starlette", "transformers", "app.serving"} & set(loaded)


def test_the_scaling_policy_is_a_leaf() -> None:
    """Ray's controller imports it, without the application's environment: the standard library and Ray must do."""
    code = "import sys, app.serving.autoscaling; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    ours = {name.removeprefix("app.serving.") for name in loaded.stdout.split() if name.startswith("app.")}
    assert ours <= {"app.serving", "autoscaling", "board", "budget", "load", "scaling"}
    assert not {"torch", "triton", "numpy"} & set(loaded.stdout.split())


def test_the_application_loads_no_test_dependency() -> None:
    code = "import sys, app.main, app.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert not {"transformers", "openai", "pytest", "hypothesis"} & set(loaded.stdout.split())


def test_kernels_is_ours() -> None:
    """Hugging Face's distribution `kernels` would be shadowed by our package of that name, so nothing may need it."""
    assert Path(kernels.__file__).parent == ROOT / "kernels"
    project = PYPROJECT["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    names = [re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0].lower() for line in wanted]
    names += [line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    assert "torch" in names
    assert "kernels" not in names

    from transformers.utils.import_utils import is_kernels_available

    assert not is_kernels_available()


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    num_lines = (function.end_lineno or 0) - function.lineno + 1
    return num_lines - len((ast.get_docstring(function, clean=False) or "").splitlines())


def test_files_and_functions_stay_short() -> None:
    long_files, long_functions = set(), set()
    for path in sources("app", "kernels", "tests"):
        name = path.relative_to(ROOT).as_posix()
        if len(path.read_text(encoding="utf-8").splitlines()) > MAX_FILE_LINES:
            long_files.add(name)
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and code_lines(node) > MAX_FUNCTION_LINES:
                long_functions.add(f"{name}:{node.name}")
    assert long_files == set(LONG_FILES)
    assert long_functions == set(LONG_FUNCTIONS)


def test_every_module_says_what_it_is() -> None:
    for path in sources("app", "kernels"):
        if path.stem != "__init__" or path.read_text(encoding="utf-8"):
            assert ast.get_docstring(parse(path)), path


def test_only_the_configuration_reads_the_environment() -> None:
    # A default for a library that takes it from nowhere else is written, not read: gloo's and NCCL's interface, and
    # that ranks may share a device's number.
    readers = {
        path.relative_to(ROOT).as_posix()
        for path in sources("app", "kernels")
        if re.search(r"\bos\.(environ\b(?!\.setdefault)|getenv\b)", path.read_text(encoding="utf-8"))
    }
    assert readers == {"app/config.py"}


def test_no_private_import_of_another_library() -> None:
    """Annotations may name a private type where the library's public functions take one."""
    for path in sources("app", "kernels"):
        tree = parse(path)
        for node in list(ast.walk(tree)):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = []
        for name in set(imported_modules(tree)) - UNDERSCORED:
            parts = name.split(".")
            assert parts[0] in {"app", "kernels", "__future__"} or not any(p.startswith("_") for p in parts), path


def public_names(path: Path) -> set[str]:
    """Names of a module's functions and classes without an underscore; jitted kernels are the wrapper's business."""
    return {
        node.name
        for node in parse(path).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_")
    }


def annotations_missing(path: Path) -> list[str]:
    """Functions of a module without full annotations; Triton's jitted ones cannot carry any."""
    missing = []
    for node in parse(path).body:
        if not isinstance(node, ast.FunctionDef) or any("jit" in ast.unparse(d) for d in node.decorator_list):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if node.returns is None or any(a.annotation is None and a.arg != "self" for a in arguments):
            missing.append(node.name)
    return missing


def test_public_exports() -> None:
    """What strangers may call: the builders, the command, the engine, and each kernel's wrapper."""
    assert public_names(ROOT / "app/main.py") == {"router", "pools"}
    assert public_names(ROOT / "app/cli.py") == {"main"}
    assert PYPROJECT["project"]["scripts"] == {"longspan": "app.cli:main"}
    assert public_names(ROOT / "app/tokenizer.py") == {"Tokenizer", "Detokenizer"}
    assert public_names(ROOT / "app/engine/engine.py") == {"Engine"}
    assert {name for name in vars(Engine) if not name.startswith("_")} == ENGINE_METHODS


def test_every_kernel_has_its_reference() -> None:
    wrappers = {}
    for path in sources("kernels"):
        names = public_names(path)
        if found := {name for name in names if f"{name}_reference" in names}:
            wrappers[path.stem] = found
    assert wrappers == KERNELS


@pytest.mark.parametrize("path", sources("kernels"), ids=lambda path: path.stem)
def test_kernel_wrappers_are_typed(path: Path) -> None:
    assert annotations_missing(path) == []


def test_the_embedded_model_matches_its_manifest() -> None:
    lines = (EMBEDDED_MODEL / "manifest.sha256").read_text(encoding="utf-8").splitlines()
    digests = {name: digest for digest, name in (line.split("  ") for line in lines)}
    described = {"README.md", "manifest.sha256", "training.json"}
    assert set(digests) == {path.name for path in EMBEDDED_MODEL.iterdir()} - described
    for name, digest in digests.items():
        assert hashlib.sha256((EMBEDDED_MODEL / name).read_bytes()).hexdigest() == digest, name
