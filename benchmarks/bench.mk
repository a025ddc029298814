# Part of the Makefile: what measures.
.PHONY: bench bench-check prove-gpu

bench: setup  ## benchmark against peers; ARGS=--data_dir=DIR with MNIST
	@$(BIN)/python -m benchmarks $(ARGS)

bench-check: setup  ## benchmark, and fail if a ratio is worse than before
	@$(BIN)/python -m benchmarks --check $(ARGS)

prove-gpu: setup  ## test this machine's NVIDIA GPU: nine minutes  # room: gpu
	@$(BIN)/python -m benchmarks.gpu $(ARGS)  # room: gpu
