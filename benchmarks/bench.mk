# Part of the Makefile: what measures.
.PHONY: bench bench-check

bench: .venv/peers  ## measure against peers, 25 minutes; ARGS='--data_dir=DIR' where MNIST is there already
	@$(BIN)/python -m benchmarks $(ARGS)

bench-check: .venv/peers  ## measure, and fail where a ratio is worse than the committed one
	@$(BIN)/python -m benchmarks --check $(ARGS)

.venv/peers: .venv/installed benchmarks/requirements.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r benchmarks/requirements.txt
	@touch $@
