"""Whole runs, from a checked configuration to the result."""
