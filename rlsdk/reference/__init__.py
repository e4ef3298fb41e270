"""The two built-in backends: single-process torch training, and a transformers rollout.

The embedded default, the oracle that other engines are tested against, and the example that engine authors read.
Registered through the same hooks as any plugin; nothing in the core knows their names.
"""
