"""Programs that make episodes: environments with tools, agents over an OpenAI-compatible gateway, chats of models."""

from __future__ import annotations

from rlsdk.agents.sandbox.confined import ConfinedSandbox
from rlsdk.agents.sandbox.opening import open_sandbox

__all__ = ["ConfinedSandbox", "open_sandbox"]
