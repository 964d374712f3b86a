# Every target first makes the environment it runs in (scripts/bootstrap.py), once.
#   DEVICE=cuda      plain vLLM for a machine with an NVIDIA GPU, instead of the CPU engine (cpu);
#                    without it .venv stays what it is
#   PYTHON=...       the Python 3.11 that .venv is made with, where it is not found
#   ARGS="..."       more arguments for what the target runs

DEVICE ?=
ARGS ?=
BENCH ?= $(basename $(notdir $(shell grep -l __main__ benchmarks/*.py)))
export PYTHON

RUN := .venv/bin/python
# A file of tests at a time on each core; more than four engines side by side take too much memory.
PYTEST = $(RUN) -m pytest -q --durations=15 -n logical --maxprocesses 4 --dist loadfile
# Any Python will do to start with: bootstrap.py finds the right one.
LAUNCHER = $(shell for p in $(RUN) $(PYTHON) python3.11 python3.12 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 6))' >/dev/null 2>&1 && echo $$p && break; done)

.DEFAULT_GOAL := help
.PHONY: help setup calibrate demo test test-all soak bench lint format clean

help: ## what can be made
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

setup: ## the environment in .venv and the test model in .cache
	@launcher="$(LAUNCHER)"; \
	if [ -z "$$launcher" ]; then \
		echo "setup: error: needs Python 3.11, and found none; install it or name it with PYTHON=" >&2; exit 1; \
	fi; \
	"$$launcher" scripts/bootstrap.py --device "$(DEVICE)"

calibrate: ## ARGS="MODEL OUT --data FILE": a checkpoint with FP8 scales and a codec profile
	@launcher="$(LAUNCHER)"; "$${launcher:-python3}" scripts/bootstrap.py --device calibrate --no-model
	@$(if $(ARGS),.venv-calibrate/bin/python calibration/oneshot.py $(ARGS),\
		.venv-calibrate/bin/python calibration/oneshot.py --help)

demo: setup ## a real server that stores its KV cache compressed, restarts, and restores it
	@$(RUN) examples/demo.py $(ARGS)

test: setup ## the tests, without those that take minutes
	@$(PYTEST) -m "not slow" $(ARGS)

test-all: setup ## all tests
	@$(PYTEST) $(ARGS)

soak: setup ## half an hour of random faults under a busy engine, or ARGS="--minutes N"
	@$(RUN) -m tests.engine.soak $(ARGS)

bench: setup ## all benchmarks, or BENCH="name ..."; figures go to .cache/bench too
	@mkdir -p .cache/bench; for name in $(BENCH); do \
		echo "== $$name"; \
		$(RUN) benchmarks/$$name.py --json .cache/bench/$$name.json $(ARGS) || exit 1; \
	done

lint: setup ## ruff
	@$(RUN) -m ruff check . && $(RUN) -m ruff format --check .

format: setup ## ruff, mending what it can
	@$(RUN) -m ruff check --fix . && $(RUN) -m ruff format .

clean: ## remove everything that was made here, the environment and the test model too
	rm -rf .venv .venv-calibrate .cache build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
