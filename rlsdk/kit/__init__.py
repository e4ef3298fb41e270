"""Building blocks for engines on torch and transformers: packing, micro-batches, log-probs, loading, schedules.

A plugin may import this room; nothing in it knows any backend. `atomic`, `balance`, `model_files` and `tokenizers` load neither torch
nor transformers by being imported; the rest is for code that runs inside an engine.
"""
