# `make train` and `make test` only need Python >= 3.11; `make help` lists the rest.
PYTHON ?= python3
ARGS ?=
VENV := .venv
check_python = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed: make PYTHON=python3.12")'
BIN := $(VENV)/bin
# One thread per core (of a container's share, which joblib knows); otherwise the launcher chooses one, and prints a notice.
export OMP_NUM_THREADS ?= $(shell $(BIN)/python -c 'import joblib; print(joblib.cpu_count())' 2>/dev/null || \
	getconf _NPROCESSORS_ONLN)
TRAIN := $(BIN)/accelerate launch --quiet --config_file accelerate_configs/cpu.yaml train.py
# $(call choose_run,first) sets run to the newest of first, first-2, … that is not done; if all are, to the next name
choose_run = run=; n=1; next=$(1); while [ -e runs/$$next ]; do \
	grep -qs '"status": "done"' runs/$$next/status.json || run=$$next; n=$$((n + 1)); next=$(1)-$$n; done; \
	if [ -e "runs/$${run:-$$next}/status.json" ]; then $(if $(filter --run% --check,$(ARGS)),:,echo "runs/$$run is not \
	done: resuming it; to start another run, add --run_name=NAME to ARGS"); fi; run=$${run:-$$next}

.PHONY: help setup train test lint format clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1|/p' $(MAKEFILE_LIST) | tr '|' '\t' | expand -t 22
	@echo; echo "ARGS is passed on: make train ARGS=--seed=1, make test ARGS='-k parity'"

setup: $(VENV)/installed  ## create .venv with everything in it

# uv takes a minute where pip takes five. It doesn't read pip.conf, so the index and constraints there are passed on.
$(VENV)/installed: pyproject.toml requirements.txt requirements-dev.txt
	@$(check_python)
	@echo "installing into $(VENV), a few GB: a minute or more"
	@$(PYTHON) -m venv $(VENV)
	@what="-r requirements.txt -r requirements-dev.txt"; pip="$(BIN)/python -m pip"; \
	index=$${UV_DEFAULT_INDEX:-$${PIP_INDEX_URL:-$$($$pip config get global.index-url 2>/dev/null)}}; \
	constraint=$${UV_CONSTRAINT:-$${PIP_CONSTRAINT:-$$($$pip config get global.constraint 2>/dev/null)}}; \
	[ -z "$$index" ] || export UV_DEFAULT_INDEX="$$index"; \
	[ -z "$$constraint" ] || export UV_CONSTRAINT="$$constraint"; \
	says=$$({ $$pip install --quiet --disable-pip-version-check 'uv>=0.9,<1' && \
		$(BIN)/uv pip install --quiet --compile-bytecode --python $(VENV) $$what; } 2>&1) || { \
		echo "uv could not install it: $$says" | head -c 1000; echo; \
		[ -z "$$UV_RESOLUTION$$UV_TORCH_BACKEND" ] || exit 1; \
		echo "installing it with pip: several minutes"; \
		$$pip install --quiet --disable-pip-version-check $$what; }
	@touch $@

ifeq ($(wildcard $(BIN)/pytest),)  # `uv sync` removes what the tests need
.PHONY: $(VENV)/installed
endif

train: setup  ## train the CNN on scikit-learn's digits, or resume it: two minutes
	@$(call choose_run,digits); $(TRAIN) --config configs/digits.yaml --run_name=$$run $(ARGS)

test: setup  ## run all but the slow tests: 8 to 11 minutes
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow and not machines' --ignore=tests/plan/gpu -n logical --maxprocesses=4 \
		--dist=worksteal $(ARGS)

.PHONY: test-oldest testall test-machines mutate

test-oldest:  ## run the same tests with the oldest versions allowed
	@UV_RESOLUTION=lowest-direct $(MAKE) --no-print-directory test VENV=.venv-oldest

testall: setup  ## run all tests, the slow ones too: two hours
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not machines' --ignore=tests/plan/gpu -n logical --maxprocesses=4 \
		--dist=worksteal $(ARGS)

test-machines: setup  ## run the multi-machine tests, as root, with Slurm
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/machines -n 2 --dist=worksteal $(ARGS)

mutate: setup  ## take out what each test protects, and see it fail
	@$(BIN)/python -m tests.mutate $(ARGS)

lint: setup  ## check style, formatting and types, changing nothing
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup  ## fix lint and formatting where possible
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

-include examples/text.mk  # make chat, make classify
-include benchmarks/bench.mk  # make bench, make bench-check
-include benchmarks/gpu.mk  # make prove-gpu
-include plan/gpu.mk  # make test-gpu
-include scripts/new.mk  # make new

clean:  ## remove the environment and caches, not runs or data
	@rm -rf .venv* .*_cache
