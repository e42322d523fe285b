# make run        serve the embedded model on this machine at http://127.0.0.1:8000
# make test       what continuous integration runs (under 12 minutes on two cores)
# make test-full  everything that needs no GPU (under 45 minutes)
#
# Each makes .venv from PYTHON (3.11 or later) and installs what it needs; a second time it installs nothing.

PYTHON ?= python3
BIN := .venv/bin
# Ray clusters and their latencies want the machine to themselves.
PYTEST_ALONE := $(BIN)/python -m pytest -n 2 --ignore tests/cluster
PYTEST_CLUSTER := $(BIN)/python -m pytest tests/cluster

# Usage statistics stay off, and `ray start` elsewhere on this machine must not find a token this one left behind.
export RAY_USAGE_STATS_ENABLED := 0
export RAY_AUTH_MODE ?= disabled

.PHONY: run test test-full
.DELETE_ON_ERROR:

run: .venv/installed
	$(BIN)/serve run serve_configs/local.yaml

test: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST_ALONE)
	$(PYTEST_CLUSTER)

test-full: .venv/installed-test
	$(PYTEST_ALONE) -m "not gpu"
	$(PYTEST_CLUSTER) -m "not gpu"

# torch goes first, by itself: pip then settles on the constrained build before anything else asks for one.
.venv/installed: pyproject.toml constraints.txt
	$(BIN)/python -c "import sys" 2>/dev/null || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/installed-test: .venv/installed
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[test]'
	touch $@
