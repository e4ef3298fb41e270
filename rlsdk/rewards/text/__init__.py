"""Graders of text, and the final answer of a response."""
