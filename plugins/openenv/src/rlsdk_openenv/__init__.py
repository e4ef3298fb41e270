"""Environments of OpenEnv servers."""

__version__ = "0.1.0"
