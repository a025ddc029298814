# Part of the Makefile. The words go by the environment as they were written: make and the shell would take a $ or a
# quote for theirs.

.PHONY: new

new: export NEW_NAME := $(value NAME)
new: export NEW_DEST := $(value DEST)
new: export NEW_TASK := $(value TASK)
new: export NEW_WITHOUT := $(value WITHOUT)
new:  ## make a project of your own from this one: NAME=my-project DEST=../my-project TASK=mnist WITHOUT="wandb check"
	@$(PYTHON) scripts/new_project.py
