# The only entrance: `make help` lists what there is. Every target works on a fresh machine.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH_VENV := .venv-bench
BENCH_READY := $(BENCH_VENV)/.ready
KERNELS := monitor/statistics/moments.c monitor/statistics/checksums.c

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help demo test check test-slow test-server test-gpu bench bench-detection bench-diagnosis bench-gpu dashboards-render sync build clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 19

$(READY): requirements/base.lock requirements/dev.lock pyproject.toml $(KERNELS)
	$(PYTHON) -m venv $(VENV)
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet -r requirements/dev.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(BENCH_READY): requirements/bench.lock pyproject.toml $(KERNELS)
	$(PYTHON) -m venv $(BENCH_VENV)
	DS_BUILD_OPS=0 $(BENCH_VENV)/bin/pip install --quiet -r requirements/bench.lock
	$(BENCH_VENV)/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

DEMO_ARGS ?=
SERVE := $(if $(serve),--serve,)

demo: $(READY) ## train a small GPT on two ranks, break it, and see it explained; `make demo serve=1` keeps the page up
	$(BIN)/trainermon run $(SERVE) -- $(BIN)/torchrun --nproc-per-node 2 examples/ddp_gpt.py --fault weight $(DEMO_ARGS)

test: $(READY) ## run the test suite
	$(BIN)/pytest -m "not slow"

test-slow: $(READY) $(BENCH_READY) ## run the widest grids, and every supported version of the frameworks
	$(BIN)/pytest -m slow --timeout 1800

check: $(READY) ## lint, types, import contract, spelling, policy tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell
	$(BIN)/pytest -q tests/policy

test-server: $(READY) ## only the tests that start real servers and browsers
	$(BIN)/pytest -m server

test-gpu: $(READY) ## only the tests that need a CUDA device
	$(BIN)/pytest -m gpu

bench: $(READY) $(BENCH_READY) ## measure what the README says, side by side with mindstudio-probe
	$(BIN)/python -m benchmarks.report --python $(BIN)/python --other-python $(BENCH_VENV)/bin/python

bench-detection: $(READY) ## judge the alert rules on more than 200 labelled runs, and write docs/detection.md
	$(BIN)/python -m benchmarks.bench_detection --write

bench-diagnosis: $(READY) ## diagnose more than 200 injected faults in every parallel split, and write docs/diagnosis.md
	$(BIN)/python -m benchmarks.bench_diagnosis --write

bench-gpu: $(READY) ## measure the statistics kernels on a CUDA device
	$(BIN)/python benchmarks/bench_statistics.py --device cuda

dashboards-render: $(READY) ## draw every Grafana dashboard into build/dashboards; needs npm
	$(BIN)/python -m tests.dashboards.grafana.render

sync: $(READY) ## write again everything that is generated from the code
	$(BIN)/python -m docs.generate

build: $(READY) ## build the source distribution and the wheel into dist/
	$(BIN)/python -m build --no-isolation

clean: ## remove environments, caches and build products
	rm -rf $(VENV) $(BENCH_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f monitor/statistics/*.so
