# The only entrance: `make help` lists what there is. Every target works on a fresh machine.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH_VENV := .venv-bench
BENCH_READY := $(BENCH_VENV)/.ready
JS_READY := node_modules/.ready
LIGHT_VENV := .venv-light
LIGHT_READY := $(LIGHT_VENV)/.ready
CUDA_VENV := .venv-cuda
CUDA_READY := $(CUDA_VENV)/.ready
TRL_VENV := .venv-trl
TRL_READY := $(TRL_VENV)/.ready
MINDSPORE_VENV := .venv-mindspore
MINDSPORE_READY := $(MINDSPORE_VENV)/.ready
# What is there already serves the demo, too.
DEMO_VENV := $(if $(wildcard $(READY)),$(VENV),.venv-demo)
DEMO_READY := $(DEMO_VENV)/.ready
# What depends on how torch was built: its flight recorders, its kernels, and what a dump catches of them.
CUDA_TESTS := tests/agent/hang tests/dump tests/replay tests/statistics tests/monitor/session/test_witness.py
# The base dependencies of the package are enough for all in these folders but what is marked `extras`, and these files.
LIGHT_TESTS := tests/core tests/exporters tests/alerts/across_ranks tests/alerts/conditions
WITH_EXTRAS := tests/core/test_derived.py tests/core/test_outbox.py tests/core/test_signing.py tests/exporters/influxdb tests/exporters/trackers tests/exporters/store/test_buckets.py tests/exporters/test_export_command.py tests/exporters/prometheus/test_conformance.py
KERNELS := $(shell find trainermon -name '*.c')
INSTALLED := requirements/base.lock requirements/torch.lock requirements/torch_cpu.lock requirements/cuda.lock pyproject.toml setup.py $(KERNELS)

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help demo test test-again test-light test-random check check-js measure coverage test-slow test-cuda-build test-trl test-mindspore test-server test-gpu bench bench-detection bench-silent bench-diagnosis bench-compare-quality bench-check bench-check-cost bench-hangs bench-mindspore bench-gpu fuzz-checkpoints dashboards-render sync lock build test-wheel release-check release-name build-release chart image clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 19

# The CPU build of torch where pip is set up to find it, else what pip finds by default: on Linux the CUDA build, which needs
# packages of its own. $(1): the environment, $(2): what stands before pip, $(3): the lock.
LOCKED := install --quiet --require-hashes
define install
	$(PYTHON) -m venv $(1)
	$(2) $(1)/bin/pip $(LOCKED) --no-deps -r requirements/torch_cpu.lock 2> /dev/null || $(2) $(1)/bin/pip $(LOCKED) --no-deps -r requirements/torch.lock
	if $(1)/bin/python requirements/is_cuda_build.py; then $(2) $(1)/bin/pip $(LOCKED) --no-deps -r requirements/cuda.lock; fi
	$(2) DS_BUILD_OPS=0 $(1)/bin/pip $(LOCKED) -r requirements/$(3).lock
	$(1)/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(1)/.ready
endef

$(READY): $(INSTALLED) requirements/dev.lock
	$(call install,$(VENV),env,dev)

.venv-demo/.ready: $(INSTALLED) requirements/demo.lock
	$(call install,.venv-demo,env,demo)

$(BENCH_READY): $(INSTALLED) requirements/bench.lock
	$(call install,$(BENCH_VENV),env,bench)

$(LIGHT_READY): requirements/light.lock requirements/base.lock pyproject.toml
	$(PYTHON) -m venv $(LIGHT_VENV)
	$(LIGHT_VENV)/bin/pip $(LOCKED) -r requirements/light.lock
	touch $@

$(TRL_READY): $(INSTALLED) requirements/dev.lock requirements/trl.lock
	$(call install,$(TRL_VENV),env,trl)

# Without torch, and with the compiled library, as users of MindSpore have it.
$(MINDSPORE_READY): requirements/mindspore.lock pyproject.toml setup.py $(KERNELS)
	$(PYTHON) -m venv $(MINDSPORE_VENV)
	$(MINDSPORE_VENV)/bin/pip $(LOCKED) -r requirements/mindspore.lock
	$(MINDSPORE_VENV)/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# With node and npm as the machine has them, else from a package of Python.
$(JS_READY): package.json package-lock.json requirements/node.lock | $(READY)
	command -v npm > /dev/null || $(BIN)/pip $(LOCKED) -r requirements/node.lock
	PATH="$$PATH:$(CURDIR)/$(BIN)" npm ci --silent
	touch $@

# With pip as it is set up for nobody in particular.
$(CUDA_READY): $(INSTALLED) requirements/dev.lock
	$(call install,$(CUDA_VENV),env -i HOME="$(CURDIR)/$(CUDA_VENV)" PATH="$$PATH" PIP_NO_CACHE_DIR=1,dev)
	$(CUDA_VENV)/bin/python requirements/is_cuda_build.py || { rm $@; echo "this pip finds no CUDA build of torch: see the configuration of pip for all users"; exit 1; }

TESTS ?= tests
# Two processes where there are two cores: a distributed test has up to four ranks of its own. nproc goes by OMP_NUM_THREADS.
WORKERS ?= $(shell test $$(env -u OMP_NUM_THREADS nproc) -ge 2 && echo 2 || echo 0)
# `make check` runs them: of all tests, they need no second run.
WITHOUT_POLICY := $(if $(filter tests,$(TESTS)),--ignore tests/policy)
DEMO_ARGS ?=
SERVE := $(if $(serve),--serve,)

demo: $(DEMO_READY) ## train a small GPT on two ranks, break it, and see it explained; `make demo serve=1` keeps the page up
	$(DEMO_VENV)/bin/trainermon run $(SERVE) -- $(DEMO_VENV)/bin/torchrun --nproc-per-node 2 examples/ddp_gpt.py --fault weight $(DEMO_ARGS)

# Bytecode is kept, whatever the environment says: the hundreds of processes of the tests would each compile the package.
test: $(READY) ## run the test suite, policy tests left to `make check`, two files side by side; `make test WORKERS=4` runs four
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -m "not slow and not mindspore" -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 25 $(WITHOUT_POLICY) $(TESTS)

# More than five are a fault of the code, whatever they say alone.
AGAIN := --last-failed --last-failed-no-failures none
test-again: $(READY) ## run what failed last once more, with nothing beside it; refuse where it is more than five tests
	@failed=$$($(BIN)/pytest -q --collect-only $(AGAIN) | grep -c ::); echo "$$failed failed"; test $$failed -le 5
	$(BIN)/pytest --verbose $(AGAIN)
	@echo "They passed alone: they depend on what runs beside them. Mend that."

test-light: $(LIGHT_READY) ## only tests that need no more than the base dependencies; two minutes, no torch
	$(LIGHT_VENV)/bin/pytest -q -m "not extras and not server and not slow and not mindspore" -n 2 --dist loadfile $(LIGHT_TESTS) $(WITH_EXTRAS:%=--ignore=%)

# What starts ranks or servers has processes of its own, which know of no order.
test-random: $(READY) ## all tests of one process in random order; the seed is printed; `make test-random TESTS=tests/core` runs some
	$(BIN)/pytest -q --random-order -m "not distributed and not server and not slow and not gpu and not mindspore" $(TESTS)

test-slow: $(READY) $(BENCH_READY) ## run the widest grids, and every supported version of the frameworks
	$(BIN)/pytest -m "slow and not mindspore" --timeout 1800
	$(MAKE) test-cuda-build
	$(MAKE) test-trl
	$(MAKE) test-mindspore

test-cuda-build: $(CUDA_READY) ## run hang, dump, replay and statistics tests with the torch that pip installs by default
	$(CUDA_VENV)/bin/pytest --timeout 1800 $(CUDA_TESTS)

test-trl: $(TRL_READY) ## train with TRL's own GRPOTrainer, with and without trainermon.rl
	$(TRL_VENV)/bin/pytest -m slow --timeout 1800 tests/rl/test_trl.py

test-mindspore: $(MINDSPORE_READY) ## watch trainings of MindSpore, in an environment without torch (2.9 GB)
	$(MINDSPORE_VENV)/bin/pytest -m mindspore --timeout 900 $(wildcard tests/*/mindspore)

check: $(READY) check-js ## lint, types, import contract, spelling, policy tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell
	$(BIN)/pytest -q tests/policy

check-js: $(JS_READY) ## lint and types of the JavaScript of the web pages
	PATH="$$PATH:$(CURDIR)/$(BIN)" node_modules/.bin/tsc
	PATH="$$PATH:$(CURDIR)/$(BIN)" node_modules/.bin/eslint .

measure: $(READY) ## print how the code is built, in numbers
	$(BIN)/python -m tests.measures

coverage: $(READY) ## run the test suite, and print which share of lines and branches each folder has seen run
	rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/coverage run -m pytest -m "not slow and not mindspore" $(TESTS)
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

bench-silent: $(READY) ## judge the monitor on published silent errors and hard healthy programs, and write docs/silent.md
	$(BIN)/python -m benchmarks.bench_silent --write

bench-diagnosis: $(READY) ## diagnose more than 200 injected faults in every parallel split, and write docs/diagnosis.md
	$(BIN)/python -m benchmarks.bench_diagnosis --write

fuzz-checkpoints: $(READY) ## open 12,000 damaged checkpoints of every format
	CHECKPOINT_MUTATIONS=1000 $(BIN)/pytest -q tests/analysis/checkpoint/test_damaged.py -k damaged_files

bench-hangs: $(READY) $(CUDA_READY) ## let small jobs hang and die, and count who is blamed rightly, with both builds of torch
	$(BIN)/python -m benchmarks.bench_hangs
	$(CUDA_VENV)/bin/python -m benchmarks.bench_hangs

bench-compare-quality: $(READY) ## compare labelled pairs of dumps, and write docs/compare_quality.md
	OMP_NUM_THREADS=1 nice -n 10 $(BIN)/python -W ignore -m benchmarks.bench_compare_quality --write

bench-check: $(READY) ## judge sound and broken results of operations and models, and write docs/check_quality.md
	OMP_NUM_THREADS=1 nice -n 10 $(BIN)/python -W ignore -m benchmarks.bench_check --write

bench-check-cost: $(READY) $(BENCH_READY) ## time check run beside mindstudio-probe, and write both verdicts into docs/check_quality.md
	OMP_NUM_THREADS=1 nice -n 10 $(BIN)/python -W ignore -m benchmarks.bench_check_cost --write

bench-mindspore: $(MINDSPORE_READY) ## measure what watching a training of MindSpore costs
	$(MINDSPORE_VENV)/bin/python -W ignore -m benchmarks.bench_mindspore

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

test-wheel: $(READY) ## install the wheel into an empty environment of every version of Python that is here, and run it
	$(BIN)/pytest -q tests/deploy

VERSION := $(shell sed -nE 's/^version = "(.*)"/\1/p' pyproject.toml)
by-digest = @case "$(2)" in *@sha256:*) ;; *) echo "$(1): found '$(2)', expected an image by its digest, name@sha256:…"; exit 1;; esac

release-check: ## refuse a TAG that is not the version of package and chart
	@test "$(TAG)" = "v$(VERSION)" || { echo "TAG: found '$(TAG)', expected v$(VERSION), as in pyproject.toml"; exit 1; }
	@grep -qx 'version: $(VERSION)' helm/trainermon/Chart.yaml || { echo "helm/trainermon/Chart.yaml: expected version: $(VERSION)"; exit 1; }

release-name: ## write the address of this repository, URL, into the metadata of package and chart, and into the README's links
	sed -i -E '/PROJECT_URL/{s@^# ?@@; s@^  url@    url@; s@PROJECT_URL@$(URL)@}' pyproject.toml helm/trainermon/Chart.yaml
	sed -i -E 's@\]\(docs/images/@]($(URL)/raw/main/docs/images/@; s@\]\(((docs|examples|trainermon)/|CHANGELOG)@]($(URL)/blob/main/\1@g' README.md

build-release: ## build dist/ in BUILD_IMAGE, so that the wheel runs with older versions of glibc too
	$(call by-digest,BUILD_IMAGE,$(BUILD_IMAGE))
	rm -rf dist build
	docker run --rm --volume "$(CURDIR):/source" --workdir /source --user "$$(id -u):$$(id -g)" --env HOME=/tmp $(BUILD_IMAGE) \
	  bash -c "python3.12 -m venv /tmp/venv && /tmp/venv/bin/pip install --quiet build && /tmp/venv/bin/python -m build"

chart: ## pack the chart into build/chart/; needs helm
	helm lint --strict helm/trainermon
	helm package helm/trainermon --destination build/chart

image: ## build the image of agent and controller on BASE_IMAGE, run it, and save it into build/image/; needs docker
	$(call by-digest,BASE_IMAGE,$(BASE_IMAGE))
	docker build --file docker/Dockerfile --build-arg BASE=$(BASE_IMAGE) --tag trainermon:$(VERSION) .
	docker run --rm --read-only --network none trainermon:$(VERSION) --version
	docker run --rm --read-only --network none trainermon:$(VERSION) rules list > /dev/null
	mkdir -p build/image
	docker save trainermon:$(VERSION) | gzip > build/image/trainermon-$(VERSION).tar.gz

clean: ## remove environments, caches and build products
	rm -rf node_modules $(VENV) $(LIGHT_VENV) .venv-demo $(BENCH_VENV) $(CUDA_VENV) $(TRL_VENV) $(MINDSPORE_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f trainermon/statistics/*.so
