"""Building blocks for engines on torch and transformers: packing, micro-batches, log-probs, loading, schedules.

Plugins may import this package; nothing in it depends on a backend. Importing `atomic`, `balance`, `model_files` and
`tokenizers` loads neither torch nor transformers; the other modules are for code that runs in an engine.
"""
