"""Commands before a run: the machine, the plan, the configuration, a small model."""
