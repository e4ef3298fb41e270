"""Every recipe on a task fit for it: `python -m benchmarks.recipes`."""
