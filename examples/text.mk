# Part of the Makefile.

.PHONY: chat classify

chat: setup  ## fine-tune a chat model with LoRA, 5 minutes; MODEL=folder
	@model=$(or $(MODEL),$$($(BIN)/python -m examples.chat_weights)) && $(call choose_run,chat) && \
	$(TRAIN) --config configs/chat_lora.yaml \
		--run_name="$$run" --task.model="$$model" $(if $(MODEL),--task.chat_template=null) $(ARGS) && \
	if [ -d runs/$$run/model ]; then $(BIN)/python -m examples.ask runs/$$run examples/chats_eval.jsonl; fi

classify: setup  ## fine-tune an encoder to sort questions; MODEL=folder
	@model=$(or $(MODEL),$$($(BIN)/python -m examples.weights)) && \
	$(call choose_run,classify) && \
	$(TRAIN) --config configs/classify.yaml --run_name="$$run" --task.model="$$model" $(ARGS)
