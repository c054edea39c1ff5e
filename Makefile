SHELL := bash
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup replay bench test lint typecheck unit e2e coverage mutants docs drift dist freeze clean

# The release of SGLang that everything works with, e.g. make test SGLANG=0.5.20. Each has an environment of its own;
# the default is the last line of python/sglang/srt/mem_cache/hicache/releases.txt.
SGLANG ?=
export SGLANG
VENV := $(shell SGLANG=$(SGLANG) bash scripts/setup_env.sh --where)
BIN := $(VENV)/bin
PY := $(BIN)/python

# What `make replay` passes on, e.g. make replay REPLAY_ARGS='--cp-size 2 --pool dsa'
REPLAY_ARGS ?= --block-tokens 64 --device-tokens 65536
# What `make bench` passes on
BENCH_ARGS ?=
# The release that `make drift` looks at: the newest one of the index unless it is named
RELEASE ?=
# What `make unit` and `make test` pass on, e.g. make unit PYTEST_ARGS='-k ledger'
PYTEST_ARGS ?=
# Processes that `make unit` runs tests in: one for each core
WORKERS ?= 2

# Nothing is fetched at run time; several processes share the cores, so each keeps to one thread.
OFFLINE := HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
TEST_ENV := $(OFFLINE) OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 MPLBACKEND=Agg

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make or update the environment, pinned (SGLANG=0.5.20: of that release; PYTHON=...: interpreter)
	@bash scripts/setup_env.sh

replay: setup ## replay the shipped request trace with both layouts (REPLAY_ARGS=...)
	@$(OFFLINE) $(BIN)/kvlayouts replay $(REPLAY_ARGS)

bench: setup ## measure beside SGLang's own caches on this CPU; JSON in build/ (BENCH_ARGS=--quick for a minute)
	@mkdir -p build
	@$(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/kvlayouts bench --json build/bench.json $(BENCH_ARGS)

test: setup lint typecheck unit ## everything that has to pass: ruff, mypy --strict, pytest

lint: setup ## ruff: rules and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

typecheck: setup ## mypy, as mypy.ini says, against the stubs of the release
	$(PY) scripts/typecheck.py $(SGLANG)

unit: setup ## pytest, with two workers (WORKERS=0: in this process; PYTEST_ARGS=...)
	$(TEST_ENV) $(PY) -m pytest -m 'not e2e' -n $(WORKERS) --no-loadscope-reorder $(PYTEST_ARGS)

e2e: setup ## real engines and a real server on tiny models (minutes; PYTEST_ARGS=...)
	$(TEST_ENV) $(PY) -m pytest -m e2e test/registered/e2e $(PYTEST_ARGS)

coverage: setup ## branches that all tests take, also in ranks, engines and servers: at least 95 % (half an hour)
	rm -f .coverage .coverage.*
	$(TEST_ENV) $(BIN)/coverage run -m pytest $(PYTEST_ARGS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --fail-under=95

mutants: setup ## break one line at a time and see that a test notices (minutes)
	$(TEST_ENV) $(PY) scripts/mutants.py

# PATH: mkdocstrings wraps signatures with ruff. The variable silences an advertisement.
docs: setup ## the documentation as a site in site/, built strictly
	PATH="$(CURDIR)/$(BIN):$$PATH" NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "docs: open site/index.html"

drift: setup ## what changed in SGLang's newest release of all that is relied on here (RELEASE=0.5.22: in that one)
	@$(OFFLINE) OMP_NUM_THREADS=1 $(PY) scripts/drift.py $(RELEASE)

dist: ## wheel and sdist in dist/; each release gets the wheel in a fresh environment and `kvlayouts check`
	@bash scripts/dist.sh

freeze: setup ## write the versions of the environment to requirements/
	@bash scripts/freeze.sh

clean: ## remove environments, caches and build output
	rm -rf .venv .venv-* build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis python/*.egg-info
	find python test packaging -name __pycache__ -type d -prune -exec rm -rf {} +
