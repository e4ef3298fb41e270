"""Roles of a run in one process: real engines without a cluster."""
