"""Rollout backend openai of rlsdk."""
