# Part of the Makefile: what measures.
.PHONY: bench bench-check

bench: setup  ## benchmark against peers; ARGS=--data_dir=DIR with MNIST
	@$(BIN)/python -m benchmarks $(ARGS)

bench-check: setup  ## benchmark, and fail if a ratio is worse than before
	@$(BIN)/python -m benchmarks --check $(ARGS)
