# Everything runs inside .venv, which is made on first use and refreshed when pyproject.toml changes.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# One known release instead of the newest in the range: small and reproducible.
TORCH ?= torch==2.13.0
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TINY := .cache/tiny

# Parallel tests share the cores: one thread each. Whoever is done takes tests from the other one.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help install test test-slow test-all soak lint format tiny demo eval-demo train-demo bench clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## Make .venv with the package and its development tools

$(STAMP): pyproject.toml
	@echo "==> Creating $(VENV) with $(PYTHON)"
	$(PYTHON) -m venv $(VENV)
	@echo "==> Installing $(TORCH)"
	$(BIN)/python -m pip install "$(TORCH)"
	@echo "==> Installing deepinfer-neuron and its development tools"
	$(BIN)/python -m pip install -e ".[dev]"
	@touch $@

test: $(STAMP) ## Run the quick tests
	$(PYTEST) -m "not slow and not soak"

test-slow: $(STAMP) ## Run the slow tests only
	$(PYTEST) -m slow

test-all: $(STAMP) ## Run every test but the soak
	$(PYTEST) -m "not soak"

soak: $(STAMP) ## Run 5,000 random requests through a small pool
	$(PYTEST) -m soak

lint: $(STAMP) ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(STAMP) ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Writes nothing if the checkpoint is already there.
tiny: $(STAMP)
	test -f $(TINY)/golden_tokens.json || $(BIN)/deepinfer-neuron tiny --out $(TINY) --golden

demo: $(STAMP) ## Generate text with the demo model, with and without drafts
	$(BIN)/python examples/neuron/drafts_on_and_off.py
	$(BIN)/python examples/neuron/run_deepinfer_tiny.py

eval-demo: $(STAMP) ## Measure the demo model on held-out text (some minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.train_demo.evaluate

# Goes on where it was interrupted; hours on two cores.
train-demo: $(STAMP) ## Train the demo model anew into .cache/train_demo
	$(BIN)/python -m tools.train_demo --folder .cache/train_demo

bench: $(STAMP) ## Measure speed and memory; BENCH="--presets tiny mid" adds a 2 GB model
	$(BIN)/python -m benchmarks.host_speed $(BENCH)

clean: ## Remove .venv, caches and builds
	rm -rf $(VENV) .cache build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache \
		.hypothesis .import_linter_cache
