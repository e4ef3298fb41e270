"""Building blocks for engines on torch and transformers: packing, micro-batches, log-probs, loading, schedules.

Plugins may import this package; nothing in it depends on a backend. Importing `files.atomic_files`,
`files.model_files` and `model.tokenizers` loads neither torch nor transformers; most other modules are for code that
runs in an engine.
"""
