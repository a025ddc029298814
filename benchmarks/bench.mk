# Part of the Makefile: what measures.
.PHONY: bench bench-check prove-gpu

bench: setup  ## benchmark against peers; ARGS='--data_dir=DIR' if MNIST is already there
	@$(BIN)/python -m benchmarks $(ARGS)

bench-check: setup  ## benchmark, and fail if a ratio is worse than the committed one
	@$(BIN)/python -m benchmarks --check $(ARGS)

prove-gpu: setup  ## test that this machine's NVIDIA GPU is right and fast, in nine minutes; ARGS='--data_dir=DIR'  # room: gpu
	@$(BIN)/python -m benchmarks.gpu $(ARGS)  # room: gpu
