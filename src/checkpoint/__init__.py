"""Checkpoints: one format for every strategy and number of processes, and nothing half-written is ever taken for one.

    checkpoints/step_00000500/
        shard-0000R-model-00001-of-00001.safetensors   what process R - 1 held, by torch.distributed.checkpoint (DCP):
                                                       model.<parameter>, optimizer.<parameter>.<state>
        rng_0000R.json                                 its random number generators
        state.json                                     training/progress.py, the settings, what the run was saved under
        manifest.json                                  size and SHA-256 of each of these; written last

All of it is safetensors and JSON: loading executes nothing. `python -m src.tools.checkpoints` looks after them.
"""
