train: setup{needs}  ## train with {config}; ARGS='--seed=1 …'
	@{model}$(call choose_run,{run}); $(TRAIN) --config {config} --run_name=$$run {settings}$(ARGS)

{rule}test: setup  ## test the task on a few rows, on one process and on two: a minute; ARGS='-k learns'
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)

