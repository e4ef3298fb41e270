"""Reward functions before they are called: found by name, inspected, adapted."""
