# Part of the Makefile. The environment passes the arguments as they are: make and a shell would interpret $ and quotes.
.PHONY: new
new: export NEW_NAME := $(value NAME)
new: export NEW_DEST := $(value DEST)
new: export NEW_TASK := $(value TASK)
new: export NEW_WITHOUT := $(value WITHOUT)
new:  ## start your own project: it asks for name, folder and task
	@$(check_python)
	@trap : INT; $(PYTHON) scripts/new.py || [ $$? = 130 ]  # which says that you left: make has nothing to add
