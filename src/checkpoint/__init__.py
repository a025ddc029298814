"""Checkpoints: one format for every strategy and number of processes, published only once complete.

    checkpoints/step_00000500/
        shard-0000R-model-00001-of-00001.safetensors   shard of process R - 1, by torch.distributed.checkpoint (DCP):
                                                       model.<parameter>, optimizer.<parameter>.<state>
        rng_0000R.json                                 its random number generators
        state.json                                     RunState of training/state.py: progress, settings, strategy, …
        manifest.json                                  size and SHA-256 of each of these files; written last

All files are safetensors or JSON, so loading executes no code. `python -m src.tools.checkpoints` inspects them.
"""
