# Part of the Makefile: what measures.
.PHONY: bench bench-check

bench: .venv/installed  ## measure against peers; ARGS='--data_dir=DIR' where MNIST is there already
	@$(BIN)/python -m benchmarks $(ARGS)

bench-check: .venv/installed  ## measure, and fail where a ratio is worse than the committed one
	@$(BIN)/python -m benchmarks --check $(ARGS)
