"""Tasks of reasoning-gym: rows that are generated, a strict grader, and the library's scorers without `eval`."""

__version__ = "0.1.0"
