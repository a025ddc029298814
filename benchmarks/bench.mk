# Part of the Makefile: what measures.
.PHONY: bench bench-check prove-gpu

bench: setup  ## measure against peers; ARGS='--data_dir=DIR' where MNIST is there already
	@$(BIN)/python -m benchmarks $(ARGS)

bench-check: setup  ## measure, and fail where a ratio is worse than the committed one
	@$(BIN)/python -m benchmarks --check $(ARGS)

prove-gpu: setup  ## prove this machine's NVIDIA GPU right and fast, in nine minutes; ARGS='--data_dir=DIR'  # room: gpu
	@$(BIN)/python -m benchmarks.gpu $(ARGS)  # room: gpu
