"""What a failure usually means, and what to do: by check, and by words in the name of the row."""

ADVICE = {
    "Launch": {
        "processes": "each process trains a model of its own: launcher and script disagree on what is distributed",
        "devices": "processes share a device: each must take the one of its LOCAL_RANK",
        "strategy": "what the yaml asks for was not applied: look for keys that Accelerate ignores, variables "
        "ACCELERATE_* in the environment, and a model that was not passed through prepare()",
        "sharded units": "only the root is wrapped, or not all blocks: name them in the model's _no_split_modules",
        "parameters": "not all is sharded, or not evenly",
        "where the shards live": "the yaml's fsdp_offload_params was not applied",
    },
    "Data": {
        "datasets": "build_datasets makes other data on each process: unseeded, or in the order of os.listdir or a set",
        "same shard": "every process reads the same shard: the sampler knows neither rank nor number of processes",
        "left out": "{:,} left out ({}, …): drop_last, or a cut at the end",
        "read twice": "{:,} read more than once ({}, …): padding that is counted",
        "order": "a step sees other examples than on one process, or in another order: the curve depends on the number "
        "of processes. Deal each global batch out, in turn, from one order that all processes draw alike",
        "resumed": "a run that was killed goes on with examples that it has seen in this epoch, or leaves some out: it "
        "must begin where the checkpoint's step says",
        "as drawn": "an augmentation depends on the process, not on the epoch, or on random numbers of its own: draw "
        "it from the seed that Task.augmented is given and from the example's index",
        "shuffled": "set_epoch was forgotten: the order doesn't depend on the epoch, and an earlier one comes again",
        "packed": "packed documents see each other, or have another place in the sequence than by themselves: "
        "positions must start anew, and attention stop, where a document ends",
    },
    "Same start": {
        "build_model": "build_model makes other weights on each process for the same seed: it draws from something "
        "that accelerate.utils.set_seed doesn't seed",
        "weights": "processes built different models: seed all alike before build_model (src/training/run.py), and "
        "only after it each in its own way, for dropout",
        "random numbers": "dropout drops the same units on every process, so that a global batch has less variety "
        "than on one: add the process's rank to the seed once the model is built",
    },
    "Gradients": {
        "finite": "the loss or its gradient overflows",
        "largest": "not the gradient of the whole batch's mean loss: a sum that was not divided or divided twice, a "
        "mean of means where processes or micro-batches count differently, a parameter that is not reduced over the "
        "processes, clipping that scales small gradients up",
        "loss": "as above: sums, counts and means",
        "norm": "the norm is one process's, or was taken before the gradients were scaled: clipping goes by it",
    },
    "Updates": {
        "settings": "a setting of optim is ignored, or a parameter is in no group, two or a wrong one: biases, norms "
        "and other vectors must not decay, and Muon is for matrices except those of embeddings and the last layer",
        "rate": "the schedule is ahead of the steps, of another form or length, or a step is left out: a prepared "
        "scheduler steps once per process; set the rate from the step, over as many steps as the optimizer takes",
        "parameters": "the optimizer did something else with the gradients than its copy on one process: parameters "
        "that it doesn't have, another learning rate or weight decay, gradients changed after they were clipped",
        "replicas": "the processes train different models by now: they started apart, or a gradient is not reduced",
        "buffers": "a buffer follows each process's own examples, and is not synchronised: evaluation and checkpoints "
        "have one process's. Use torch.nn.SyncBatchNorm for BatchNorm, or better a norm that looks at one example",
    },
    "Accumulation": {
        "": "micro-batches change the result: Task.loss returns a mean in place of the sum over its targets, or "
        "another number than theirs, or an example's loss depends on those beside it",
    },
    "Evaluation": {
        "batches": "a process has fewer batches than others, which wait for it: without an example left, it has to "
        "compute on a dummy batch of weight 0",
        "in training mode": "dropout and the like are on: evaluate() must begin with model.eval()",
        "other weights": "the metrics are those of other weights, such as an average of them (EMA)",
        "afterwards": "training goes on from something else: evaluate() must end with model.train(), put weights back "
        "that it swaps (EMA), leave the optimizer's state alone, and draw random numbers from a generator of its own",
        "examples": "examples are counted twice, as padding, or left out",
        "": "a mean of each process's or each batch's mean, or counted padding: sum and count over all examples, or "
        "compute it from all of them, gathered in order",
    },
    "Checkpoint": {
        "saved": "a checkpoint can't be written to the output folder",
        "losses": "the checkpoint forgets something: the optimizer's state (the second loss differs, not the first), "
        "the random numbers or the position in the data",
        "weights": "as above",
    },
    "Precision": {
        "products": "not computed in the precision that was asked for: the model missed prepare(), or casts by itself",
        "loss": "the loss is computed in half precision, and its gradient too: take it of logits.float()",
        "": "small updates are lost in half precision: load the weights in fp32; mixed precision computes in half",
    },
    "Cost": {
        "sent": "not what the strategy has to send: gradients reduced after each micro-batch, or not at all, a "
        "strategy other than it seems, or a model that communicates by itself",
    },
}


def likely_cause(check: str, row: str) -> str:
    """Return the first of the check's texts whose words are in the row's name."""
    return next(text for words, text in ADVICE[check].items() if words in row)
