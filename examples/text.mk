# Part of the Makefile.

.PHONY: chat classify

chat: setup  ## fine-tune a chat model with LoRA on questions about this project, 5 minutes; MODEL=folder of another one
	@name=chat; n=1; while [ -e runs/$$name ]; do n=$$((n + 1)); name=chat-$$n; done; \
	model=$(or $(MODEL),$$($(BIN)/python -m examples.weights chat)) && \
	$(BIN)/accelerate launch --quiet --config_file accelerate_configs/cpu.yaml train.py --config configs/chat_lora.yaml \
		--run_name=$$name --task.model=$$model $(if $(MODEL),--task.chat_template=null) $(ARGS)

classify: setup  ## fine-tune an encoder to tell what a question is about; MODEL=folder of another one
	@name=classify; n=1; while [ -e runs/$$name ]; do n=$$((n + 1)); name=classify-$$n; done; \
	model=$(or $(MODEL),$$($(BIN)/python -m examples.weights classify)) && \
	$(BIN)/accelerate launch --quiet --config_file accelerate_configs/cpu.yaml train.py --config configs/classify.yaml \
		--run_name=$$name --task.model=$$model $(ARGS)
