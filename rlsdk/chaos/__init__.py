"""Faults on purpose: kills processes of runs, one after another, and computes what each has cost."""
