"""Know before you rent: whether a run fits, how long it takes and what it costs, on any number of GPUs. See docs/plan.md."""
