"""`train.py --check`: proves on the user's own machine that the run is right, with the run's own parts.

The silent faults of distributed training raise no error: the model just comes out worse. Here the run's data path, its
step, its evaluation and its checkpoints are held against src/reference.py, which does the same by hand. One file for
each of the ten checks, or for two that share their steps; docs/check.md says what they find.

Each process needs memory for an unwrapped copy of the model, its gradients and its optimizer's state.
"""
