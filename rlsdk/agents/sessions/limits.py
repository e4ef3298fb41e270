"""Limits of one episode."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """Limits of what an agent may ask for; beyond them requests are refused, and the episode is trained as it is."""

    max_turns: int = 32
    """Answers of the model."""
    max_episode_tokens: int | None = None
    """Sampled tokens of all turns; None: no limit."""
    max_rows: int | None = None
    """Most rows of an episode that are trained, drawn at random; None: all."""
    train_roles: tuple[str, ...] = ("agent",)
    """Roles of rows that are trained: `agent`, `auxiliary`."""
