"""Rewards over HTTP: the protocol, its client and server, and judges."""
