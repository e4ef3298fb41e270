"""Weights of a rollout engine: where each tensor goes, how an update arrives, is checked and quantized."""
