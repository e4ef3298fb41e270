"""Graders of numbers and expressions: normalization, structure, exact quantities, algebra last."""
