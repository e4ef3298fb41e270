"""Agents: functions and commands that make episodes through the gateway."""
