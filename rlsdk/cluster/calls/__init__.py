"""Calls of a host's method on the ranks of its group: sent, forwarded, awaited and joined."""
