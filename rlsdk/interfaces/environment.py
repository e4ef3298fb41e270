"""Environments and chats: what an author of a task writes, and how a model's chat is written and read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Message = Mapping[str, Any]
"""One message of a chat: `role`, `content`; with tools also `tool_calls`, `tool_call_id`, `name`; JSON types only."""
Tool = Mapping[str, Any]
"""JSON schema of a tool: `{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}`."""

ENVIRONMENT_REWARD = "environment"
"""Name of the score that an episode brings with it, among the rewards."""


class Environment(Protocol):
    """A task with state, chosen by `rollout.environment: file.py:Class`; one object a sample.

    A class is an environment by its methods, and inherits nothing. Its public methods other than these are the tools:
    name, type hints and docstring (Google style) become their schemas. Methods may be async; the others run in a
    thread. All of these but `reset` are optional:

    - `get_reward() -> float | Mapping[str, float] | None`: the score, asked for once at the end. A mapping is summed,
      and its parts are logged. None: not scored.
    - `turn_reward() -> float`: asked for after every turn; stands on the turn's last token.
    - `done: bool`: True ends the episode.
    - `close() -> None`: called once, also after errors and timeouts.
    - `stateless: Collection[str] | bool`: tools whose result depends on their arguments alone, and that change nothing
      in the object; True: all. When a killed run goes on, results that they gave are not asked for again.
    """

    def reset(self, **row: Any) -> str | Sequence[Message] | None:
        """Begins an episode.

        Args:
            row: the fields of the data row that are parameters; `seed: int` is passed if it is one.

        Returns:
            What the model sees after the row's prompt: text, or messages. None: nothing.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call as the model wrote it."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    """Identity within its chat; empty: the format of the model has none."""


@dataclass(frozen=True, kw_only=True)
class AssistantMessage:
    """A turn of the model, read."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    malformed: str | None = None
    """Why it has no calls although it began one; None: it began none, or all were read. Its text is in `content`."""


class ToolFormat(Protocol):
    """How the chat of one model is written and read."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Token ids of a chat, up to where the model begins its turn. Control tokens in texts are encoded as text."""
        ...

    def extend(
        self, ids: Sequence[int], messages: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        """Token ids that continue a chat, without the past being rendered again.

        Args:
            ids: of the chat so far, the model's last turn as it was sampled included.
            messages: the chat so far, of which the last one is the model's turn.
            new: what follows it: results of tools, a user's turn.
            tools: those of the chat.

        Returns:
            The new ids only, up to where the model begins its turn; None: the template would change the past.
        """
        ...

    def read(self, ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[Tool]) -> AssistantMessage:
        """Reads a turn. Never raises: a call that cannot be read is text.

        Args:
            ids: as sampled, the token that ended the turn included.
            prompt_ids: everything before them.
            tools: those of the chat, for the types of arguments.
        """
        ...
