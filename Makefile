# Everything people and CI run. Each target does its own set-up: a virtual environment in .venv, nothing global.
# Set-up runs again only when pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.set-up
PYTEST_ARGS ?=
ARGS ?=
GPU_ARGS ?=
# A file runs on one worker, for what its tests share; in the order of tests/conftest.py, long files first. Tests wait
# for processes: on two cores three workers take 343 s, two 420 s.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all versions check docs bench gpu cuda-check dist clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv and install spanwise with its development tools

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: '$(PYTHON)' not found; install Python >= 3.10 or name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: spanwise needs Python >= 3.10, but '$(PYTHON)' is $$($(PYTHON) -V 2>&1);" \
	       "name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' cannot make virtual environments (on Debian: apt-get install python3-venv)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing spanwise and its development tools into $(VENV)"
	$(BIN)/python -m pip install $(if $(CI),-qq) --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)  ## train on packed documents over 4 ranks, and prove losses and gradients against one device
	rm -rf runs/demo
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 4 examples/train_packed.py --out runs/demo

# The processes of a run share what the first one compiles, whatever the caller's shell says.
test test-all versions: export PYTHONDONTWRITEBYTECODE :=

test: $(STAMP)  ## a representative part of the tests (PYTEST_ARGS='-k mask' for some)
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-all: $(STAMP)  ## all tests
	$(PYTEST) $(PYTEST_ARGS)

versions: $(STAMP)  ## the tests on every supported torch and Python (ARGS='--only 2.15 -- tests/masks' for some)
	mkdir -p runs
	$(BIN)/python -m tests.versions $(ARGS); found=$$?; $(BIN)/python docs/make_versions.py; exit $$found

check: $(STAMP)  ## lint, format, types, who may import whom, and sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tests/budgets.py

docs: $(STAMP)  ## build the site into site/, and check its links
	$(BIN)/python -m pip install $(if $(CI),-qq) --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python docs/check_site.py site

bench: $(STAMP)  ## measure, print a table, write JSON
	$(BIN)/python -m benchmarks.plan times
	$(BIN)/python -m benchmarks.plan layouts

gpu: $(STAMP)  ## run all that needs a CUDA device, in ten minutes (GPU_ARGS='--only parity'; --dry: on a CPU)
	$(BIN)/python -m benchmarks.gpu $(GPU_ARGS)

cuda-check:  ## compile the CUDA kernels without a device (puts a CUDA build of torch, 6 GB, into .cuda)
	test -x .cuda/bin/python || $(PYTHON) -m venv .cuda
	.cuda/bin/python -m pip install -q --disable-pip-version-check torch==2.14.1 numpy numba
	.cuda/bin/python -W ignore -m benchmarks.cuda_compile

dist: $(STAMP)  ## build dist/*.tar.gz and, from it, dist/*.whl
	rm -rf dist
	$(BIN)/python -m build --no-isolation

clean:  ## remove .venv, caches, runs and dist
	rm -rf $(VENV) .versions .cuda runs dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find spanwise tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
