"""Limits of one episode of an environment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds an episode."""

    max_turns: int = 32
    """Turns of the model."""
    max_episode_tokens: int | None = None
    """Sampled tokens, of all turns."""
    max_tool_chars: int = 16_000
    """Characters of a tool's result; longer ones are cut in the middle."""
    max_tool_failures: int = 5
    """Failures in a row after which the episode ends."""
    setup_s: float = 60.0
    """Making the object, and `reset`."""
    tool_s: float = 30.0
    """One call of a tool, or of `turn_reward`."""
    agent_s: float = 900.0
    """All turns."""
    finalize_s: float = 60.0
    """`get_reward`, and `close`."""
