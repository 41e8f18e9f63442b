# The only entrance: `make help` lists what there is. Every target works on a fresh machine.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH_VENV := .venv-bench
BENCH_READY := $(BENCH_VENV)/.ready
CUDA_VENV := .venv-cuda
CUDA_READY := $(CUDA_VENV)/.ready
# What depends on how torch was built: its flight recorders, its kernels, and what a dump catches of them.
CUDA_TESTS := tests/agent/hang tests/dump tests/monitor/statistics tests/monitor/session/test_witness.py
KERNELS := trainermon/monitor/statistics/moments.c trainermon/monitor/statistics/checksums.c

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help demo test check coverage test-slow test-cuda-build test-server test-gpu bench bench-detection bench-diagnosis bench-compare-quality bench-hangs bench-gpu dashboards-render sync lock build clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 19

$(READY): requirements/base.lock requirements/dev.lock pyproject.toml $(KERNELS)
	$(PYTHON) -m venv $(VENV)
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet --require-hashes -r requirements/dev.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(BENCH_READY): requirements/bench.lock pyproject.toml $(KERNELS)
	$(PYTHON) -m venv $(BENCH_VENV)
	DS_BUILD_OPS=0 $(BENCH_VENV)/bin/pip install --quiet --require-hashes -r requirements/bench.lock
	$(BENCH_VENV)/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# pip as it is set up for nobody in particular, which installs torch's CUDA build and what that needs beside the lock; all
# the rest is the same lock's.
$(CUDA_READY): requirements/base.lock requirements/dev.lock pyproject.toml $(KERNELS)
	$(PYTHON) -m venv $(CUDA_VENV)
	env -i HOME="$(CURDIR)/$(CUDA_VENV)" PATH="$$PATH" $(CUDA_VENV)/bin/pip install --quiet --no-cache-dir "$$(grep -om1 '^torch==[0-9.]*' requirements/dev.lock)"
	env -i HOME="$(CURDIR)/$(CUDA_VENV)" PATH="$$PATH" DS_BUILD_OPS=0 $(CUDA_VENV)/bin/pip install --quiet --no-cache-dir --require-hashes -r requirements/dev.lock
	$(CUDA_VENV)/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None and f"torch {torch.__version__} is no CUDA build, which pip installs by default: see the configuration of pip for all users")'
	$(CUDA_VENV)/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

TESTS ?= tests
DEMO_ARGS ?=
SERVE := $(if $(serve),--serve,)

demo: $(READY) ## train a small GPT on two ranks, break it, and see it explained; `make demo serve=1` keeps the page up
	$(BIN)/trainermon run $(SERVE) -- $(BIN)/torchrun --nproc-per-node 2 examples/ddp_gpt.py --fault weight $(DEMO_ARGS)

test: $(READY) ## run the test suite
	$(BIN)/pytest -m "not slow"

test-slow: $(READY) $(BENCH_READY) ## run the widest grids, and every supported version of the frameworks
	$(BIN)/pytest -m slow --timeout 1800
	$(MAKE) test-cuda-build

test-cuda-build: $(CUDA_READY) ## run hang, dump, replay and statistics tests with the torch that pip installs by default
	$(CUDA_VENV)/bin/pytest --timeout 1800 $(CUDA_TESTS)

check: $(READY) ## lint, types, import contract, spelling, policy tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell
	$(BIN)/pytest -q tests/policy

coverage: $(READY) ## run the test suite, and print which share of lines and branches each folder has seen run
	rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/coverage run -m pytest -m "not slow" $(TESTS)
	$(BIN)/coverage combine --quiet
	$(BIN)/python -m tests.coverage_by_folder

test-server: $(READY) ## only the tests that start real servers and browsers
	$(BIN)/pytest -m server

test-gpu: $(READY) ## only the tests that need a CUDA device
	$(BIN)/pytest -m gpu

bench: $(READY) $(BENCH_READY) ## measure what the README says, side by side with mindstudio-probe
	$(BIN)/python -m benchmarks.report --python $(BIN)/python --other-python $(BENCH_VENV)/bin/python

bench-detection: $(READY) ## judge the alert rules on labelled runs of twelve families, and write docs/detection.md
	$(BIN)/python -m benchmarks.bench_detection --write

bench-diagnosis: $(READY) ## diagnose more than 200 injected faults in every parallel split, and write docs/diagnosis.md
	$(BIN)/python -m benchmarks.bench_diagnosis --write

bench-hangs: $(READY) $(CUDA_READY) ## let small jobs hang and die, and count who is blamed rightly, with both builds of torch
	$(BIN)/python -m benchmarks.bench_hangs
	$(CUDA_VENV)/bin/python -m benchmarks.bench_hangs

bench-compare-quality: $(READY) ## compare labelled pairs of dumps, and write docs/compare_quality.md
	OMP_NUM_THREADS=1 nice -n 10 $(BIN)/python -W ignore -m benchmarks.bench_compare_quality --write

bench-gpu: $(READY) ## measure the statistics kernels on a CUDA device
	$(BIN)/python benchmarks/bench_statistics.py --device cuda

dashboards-render: $(READY) ## draw every Grafana dashboard into build/dashboards; needs npm
	$(BIN)/python -m tests.dashboards.grafana.render

sync: $(READY) ## write again everything that is generated from the code
	$(BIN)/python -m docs.generate

lock: ## write the hashes of all their files beside the pinned versions in requirements/*.lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet pip-tools
	build/lock/bin/python requirements/hash_locks.py requirements/*.lock

build: $(READY) ## build the source distribution and the wheel into dist/
	$(BIN)/python -m build --no-isolation

clean: ## remove environments, caches and build products
	rm -rf $(VENV) $(BENCH_VENV) $(CUDA_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f trainermon/monitor/statistics/*.so
