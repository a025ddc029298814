# Part of the Makefile: what tests a real GPU.
.PHONY: prove-gpu

prove-gpu: setup  ## test this machine's NVIDIA GPU: nine minutes
	@$(BIN)/python -m benchmarks.gpu $(ARGS)
