"""Tasksets of verifiers: their rows, an agent that plays and scores them, and a harness that needs no process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlsdk_verifiers.agent import play
    from rlsdk_verifiers.harness import ChatHarness

__version__ = "0.1.0"
__all__ = ["ChatHarness", "play"]


def __getattr__(name: str) -> Any:
    """Imports when something is used: the registration must stay light. verifiers finds the harness here."""
    if name == "play":
        from rlsdk_verifiers.agent import play

        return play
    if name == "ChatHarness":
        from rlsdk_verifiers.harness import ChatHarness

        return ChatHarness
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
