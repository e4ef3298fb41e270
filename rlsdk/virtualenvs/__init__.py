"""Plugins installed, into this environment or one of their own: made, filled, tested and recorded."""
