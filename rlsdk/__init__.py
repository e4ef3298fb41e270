"""Reinforcement-learning post-training of language models in which every heavy engine is a plugin."""

__version__ = "0.1.0"

__all__ = ["__version__"]
