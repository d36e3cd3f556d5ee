# The two commands of the README: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo test kinds soak lint test-exhaustive benchmark gpu-check docs clean

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

## make demo              see it work on a pretend guest; needs no root, docker or GPU
demo: .venv/installed
	$(BIN)/python deployments/demo/demo.py

## make test              everything that is tested; installs what it needs (root: all of it)
test:
	PYTHON="$(PYTHON)" sh tests/run.sh

## make kinds             every kind of hostile day on the real guest, counted; needs root
kinds: .venv/dev
	sh tests/lab/install.sh
	$(BIN)/pytest -q -m 'exhaustive or not exhaustive' tests/guest/test_guest_kinds.py tests/unit/test_kinds.py

## make test-exhaustive   the long walks: thousands of random examples, runs killed at every step
test-exhaustive: .venv/dev
	$(BIN)/pytest -m exhaustive tests

## make soak              200 passes of reclaim, hold and restore with random faults; needs root
soak: .venv/dev
	sh tests/lab/install.sh
	$(BIN)/pytest -s --show-capture=no -m exhaustive tests/guest/test_guest_soak.py

## make lint              ruff, mypy and import-linter
lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=tests $(BIN)/mypy --explicit-package-bases tests benchmarks docs
	$(BIN)/mypy deployments/demo/*.py
	$(BIN)/lint-imports

## make benchmark         the README's figures; needs root
benchmark: .venv/dev
	sh tests/lab/install.sh
	PYTHONPATH=tests $(BIN)/python benchmarks/one_host.py

# A strict editable install links file by file: a new module needs a new install.
MODULES := $(wildcard src/gpu_reclaim/*.py src/gpu_reclaim/*/*.py blocks/*.py tasks/*.py flows/*.py)

.venv/installed: pyproject.toml $(MODULES)
	@echo "Installing into .venv (a minute or two, the first time)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -e .
	touch $@

.venv/dev: pyproject.toml $(MODULES)
	@echo "Installing into .venv, with the tools for tests (a minute or two, the first time)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -e '.[dev]'
	touch .venv/installed $@

## make gpu-check         the promises, on this machine's real, idle GPUs; needs root
gpu-check: .venv/installed
	$(BIN)/python benchmarks/gpu_check.py

## make docs              write the table of verdicts anew from the code
docs: .venv/installed
	$(BIN)/python docs/write_verdicts.py

## make clean             remove the virtual environment and what was built
clean:
	rm -rf .venv build dist *.egg-info src/*.egg-info
