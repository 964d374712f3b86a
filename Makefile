# Every target first makes the environment it runs in (scripts/bootstrap.py), once.
#   DEVICE=cuda      plain vLLM for a machine with an NVIDIA GPU, instead of the CPU engine
#   PYTHON=python3.11 the Python that .venv is made with, where the right one is not found
#   ARGS="..."       more arguments for what the target runs

DEVICE ?= cpu
ARGS ?=
export PYTHON

RUN := .venv/bin/python
LAUNCHER = $(or $(PYTHON),$(shell for p in python3.11 python3.12 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null && echo $$p && break; done))

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all bench lint format clean

help: ## what can be made
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

setup: ## the environment in .venv and the test model in .cache
	@if [ -z "$(LAUNCHER)" ]; then \
		echo "setup: error: needs Python 3.11, and found no Python; install it or name it with PYTHON=" >&2; \
		exit 1; fi
	@$(LAUNCHER) scripts/bootstrap.py --device $(DEVICE)

demo: setup ## a real server that stores its KV cache compressed, restarts, and restores it
	@$(RUN) examples/demo.py $(ARGS)

test: setup ## the tests, without those that take minutes
	@$(RUN) -m pytest -m "not slow" -q --durations=15 $(ARGS)

test-all: setup ## all tests
	@$(RUN) -m pytest -q --durations=15 $(ARGS)

bench: setup ## all benchmarks
	@for script in benchmarks/bench_*.py; do echo "== $$script"; $(RUN) $$script $(ARGS) || exit 1; done

lint: setup ## ruff
	@$(RUN) -m ruff check . && $(RUN) -m ruff format --check .

format: setup ## ruff, mending what it can
	@$(RUN) -m ruff check --fix . && $(RUN) -m ruff format .

clean: ## remove everything that was made here, the environment and the test model too
	rm -rf .venv .cache build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
