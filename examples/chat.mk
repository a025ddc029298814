# Part of the Makefile.

.PHONY: chat

chat: setup  ## fine-tune a chat model with LoRA on questions about this project; MODEL=folder of another one
	@name=chat; n=1; while [ -e runs/$$name ]; do n=$$((n + 1)); name=chat-$$n; done; \
	$(BIN)/accelerate launch --quiet --config_file accelerate_configs/cpu.yaml train.py --config configs/chat_lora.yaml \
		--run_name=$$name $(if $(MODEL),--task.model=$(MODEL)) $(ARGS) && \
	$(BIN)/python -m src.tools.generate runs/$$name --prompt "What does --check do?" --temperature 0 --compare && \
	echo "ask it more: .venv/bin/python -m src.tools.generate runs/$$name"
