.PHONY: test-gpu

XDIST := -n logical --maxprocesses=4 --dist=worksteal
# What an emulated GPU can't do, NCCL's time-outs, and faults that are none where there are GPUs.
CANNOT := --deselect tests/faults/test_killed.py::test_a_process_that_hangs_ends_the_run_by_timeout_minutes \
	--deselect tests/check/test_check.py::test_another_strategy_than_was_asked_for_fails
# Of both tables, the rows of tasks that tests/plan/gpu trains under every yaml, or that need kernels of their own.
CANNOT += $(foreach task,lm experts new classifier pictures table pairs,\
	--deselect 'tests/core/test_parity.py::test_each_task_has_the_curve_of_one_process_under_every_strategy[$(task)' \
	--deselect 'tests/faults/test_resume.py::test_each_task_resumes_exactly[$(task)')

test-gpu: setup  ## run the GPU tests on emulated GPUs: 15 minutes
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/plan/gpu $(XDIST) $(ARGS)
	@OMP_NUM_THREADS=1 TESTS_USE_GPUS=1 $(BIN)/python -m tests.plan.gpu.build --devices=4 $(BIN)/python -m pytest -m 'not slow' $(CANNOT) $(XDIST) \
		tests/core/test_parity.py tests/faults $(wildcard tests/check/test_check.py) \
		$(patsubst %,'%::test_the_file_prints_what_its_page_says[larger-7-train.md]',$(wildcard tests/pages/test_learn.py)) $(ARGS)
