# `make train` and `make test` work on a fresh machine that has Python >= 3.11; `make help` lists the rest.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
# One thread per core; without it the launcher prints that it chose so itself.
export OMP_NUM_THREADS ?= $(shell getconf _NPROCESSORS_ONLN)

.PHONY: help setup uv train test testall test-machines lint format clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

setup: .venv/installed  ## make .venv with everything in it

.venv/installed: pyproject.toml requirements.txt requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed: make PYTHON=python3.12")'
	@echo "installing into .venv, a few GB: minutes"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-dev.txt
	@touch $@

ifeq ($(wildcard $(BIN)/pytest),)  # `uv sync` takes out what the tests need
.PHONY: .venv/installed
endif

uv:  ## the same with uv, if it is installed
	@uv venv --quiet --allow-existing --seed --python $(PYTHON) .venv
	@uv pip install --quiet --compile-bytecode --python .venv -r requirements.txt -r requirements-dev.txt
	@touch .venv/installed

train: setup  ## train the CNN on scikit-learn's digits: two minutes on 2 cores, no download; ARGS='--seed=1 …'
	@name=digits; n=1; while [ -e runs/$$name ]; do n=$$((n + 1)); name=digits-$$n; done; \
	$(BIN)/accelerate launch --quiet --config_file accelerate_configs/cpu.yaml train.py --config configs/digits.yaml \
		--run_name=$$name $(ARGS)

test: setup  ## run all but the slow tests, 5 to 10 minutes; ARGS='-k parity' for some of them
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow and not machines' -n logical --maxprocesses=4 --dist=worksteal $(ARGS)

testall: setup  ## run the slow tests too, more than an hour
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not machines' --ignore=tests/gpu -n logical --maxprocesses=4 \
		--dist=worksteal $(ARGS)

test-machines: setup  ## run the tests of several machines, as root: they need network namespaces, and Slurm  # room: machines
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/machines -n 2 --dist=worksteal $(ARGS)  # room: machines

lint: setup  ## run linter, formatter and type checker, changing nothing
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup  ## let the linter and the formatter change what they can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

-include examples/chat.mk  # make chat
-include benchmarks/bench.mk  # make bench, make bench-check
-include tests/gpu.mk  # make test-gpu
-include scripts/new.mk  # make new

clean:  ## remove .venv and caches; runs/ and data/ stay
	@rm -rf .venv .*_cache
