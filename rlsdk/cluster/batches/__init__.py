"""Rows of a batch on their way to the ranks: cut, balanced and stored once per node."""
