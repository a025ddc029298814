"""Know before you rent: whether a run fits, how long it takes, what it costs on any number of GPUs (plan/README.md)."""
