"""Agents: programs that speak to the policy in chat messages, over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlsdk.interfaces.trajectory import PromptView


@dataclass(frozen=True, kw_only=True)
class AgentSession:
    """Where an agent reaches the policy: `openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)`."""

    base_url: str
    """Of an OpenAI-compatible endpoint; it is this episode's own."""
    api_key: str
    """The episode's key. A secret: with it, a program can sample for the episode."""
    model: str
    """Name of the model; others are accepted, there is one."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an agent says of its episode, when a score is not enough."""

    reward: float | None = None
    """Score, added to that of the configured rewards; None: only these score it."""
    info: Mapping[str, float] = field(default_factory=dict)
    """As `Trajectory.info`."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """As `Trajectory.extra`: data for the rewards."""


class Agent(Protocol):
    """Makes one episode: `async def agent(prompt, session, **options) -> float | Outcome | None`.

    Called once for each sample of a group, on an event loop of all agents. It returns its score, or nothing if the
    configured rewards score it. What it does between its requests is its own: tools, other models, other agents. An
    exception fails its sample, unless a limit of the episode had been reached.
    """

    async def __call__(self, prompt: PromptView, session: AgentSession, **options: Any) -> float | Outcome | None: ...
