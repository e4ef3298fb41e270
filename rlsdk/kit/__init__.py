"""Building blocks for engines on torch and transformers: packing, micro-batches, log-probs, loading, schedules.

A plugin may import this room; nothing in it knows any backend. It imports torch and transformers, so only code that
runs inside an engine should import it.
"""
