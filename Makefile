# busload: `make demo` shows it, `make test` proves it, `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
CLUSTER ?= embedded
REGISTRY ?=
export CLUSTER REGISTRY

.PHONY: help
help: ## This list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'
	@echo; echo "  demo and demo-down take:"
	@echo "  CLUSTER=current     the cluster of your current kubeconfig (default: embedded, one of its own)"
	@echo "  REGISTRY=host/path  with CLUSTER=current: where to push the images when the cluster cannot load them"

.PHONY: demo demo-down
demo: ## From an empty machine to a tuned, answering InferenceService (root, Python >= 3.11, Go)
	@$(PYTHON) -m e2e.setup demo
	@$(PY) -m e2e.demo up
demo-down: ## Removes all that `make demo` brought up
	@$(PYTHON) -m e2e.setup down

.PHONY: setup
setup: ## Virtual environment with everything the tests need
	@$(PYTHON) -m e2e.setup test

# What starts servers and engines; the rest computes.
LIVE := tests/contract tests/runtime/bench tests/runtime/engine tests/runtime/server
.PHONY: test test-unit test-rest test-live test-contract test-kernels kernel-gate gpu-check soak soak-short e2e lint
test: lint kernel-gate test-unit soak-short e2e ## Everything: lint, types, unit tests, a minute of soak, end-to-end tests
test-unit: setup ## Unit and property tests (no cluster), in two halves side by side
	@echo "==> CPU engine: compiled on first use (a minute or two), then cached"
	$(PY) -c "from busload_kernels.cpu import library; print(library.usable_isas())"
	$(MAKE) --no-print-directory -j2 test-rest test-live
# Whole lines, so that two halves can share a terminal: make's own way (-Oline) shows nothing before the end.
test-rest: setup
	$(PY) -m pytest tests $(LIVE:%=--ignore=%) 2>&1 | sed -u 's/^/rest | /'
test-live: setup
	$(PY) -m pytest $(LIVE) 2>&1 | sed -u 's/^/live | /'
test-contract: setup ## What a client may rely on, against live servers; public suites (7 minutes)
	$(PY) -m pytest tests/contract
	$(PY) -m e2e.contract
test-kernels: kernel-gate ## GPU kernels without a GPU: compiled for sm_80, sm_90, sm_100, and interpreted
	$(PY) -m pytest tests/kernels/gpu
kernel-gate: setup
	$(PY) -m busload_kernels.gpu.gate
gpu-check: ## On a machine with a GPU and torch: kernels right, tiles tuned, times, tokens/s (10 minutes)
	e2e/gpu/check.sh $(ARGS)
e2e: setup ## End-to-end tests on the embedded cluster (root, Go)
	$(PY) -m pytest e2e
soak soak-short: setup
soak: MINUTES ?= 10
soak-short: MINUTES = 1
soak: ## All that clients do to a server at once, for MINUTES=10, drawn from SEED=1; what is left behind
soak soak-short:
	$(PY) -m e2e.soak --minutes $(MINUTES) --seed $(or $(SEED),1) --output e2e/out/soak.json
lint: setup ## ruff, and mypy with strict types
	@twice=$$(find tests -name '*.py' ! -name conftest.py -exec basename {} \; | sort | uniq -d); [ -z "$$twice" ] || { \
	  echo "error: two files under tests/ have one name, and Python imports only one of them; rename one:" $$twice; exit 1; }
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

.PHONY: bench bench-peers bench-serving bench-connections
bench: setup ## Continuous against static batching, side by side
	$(PY) -m e2e.bench.static_batching --executor cpu --repeats 3
bench-peers: setup ## This server against llama.cpp and OpenVINO GenAI (root; installs them, 15 minutes, idle machine)
	$(PY) -m e2e.bench.peers
bench-connections: setup ## 1,000 connections, 500 streams against one server: who is answered, memory, scrape time
	$(PY) -m e2e.bench.connections
bench-serving: setup ## Start, shared prefix, memory, idle CPU and steps, each beside its bar (3 minutes, idle machine)
	$(PY) -m e2e.bench.serving

.PHONY: crds
crds: setup ## Regenerates crds/ from the pydantic models (then charts/render.sh)
	$(VENV)/bin/busload crd -o crds/inferenceservices.busload.dev.yaml

.PHONY: clean
clean: ## Removes what builds left in the tree (never caches or clusters)
	rm -rf dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis e2e/out
