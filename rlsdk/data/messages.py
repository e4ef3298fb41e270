"""Chat messages of a row: what a message may hold, and its text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlsdk.data.rows import JsonValue, Messages
from rlsdk.interfaces import DataError

PLAIN = frozenset({"role", "content"})
"""Fields that every chat template reads. Others (`tool_calls`, `reasoning_content`, `name`) are up to the template."""
PLAIN_OR_CALLS = frozenset({"content", "tool_calls"})
"""A message has at least one of these."""
ASSISTANT = "assistant"
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bing": ASSISTANT, "bard": ASSISTANT,
    "model": ASSISTANT, "assistant": ASSISTANT, "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip
"""Who speaks in a ShareGPT turn (`{"from": ..., "value": ...}`) -> role of the message."""


def as_messages(value: JsonValue) -> Messages | None:
    """The turns of a conversation with role and content; ShareGPT's `from` and `value` are renamed, other fields kept.
    None: it is no list of turns, or a turn is said by somebody of an unknown name."""
    if not isinstance(value, list | tuple) or not value:
        return None
    found: list[Mapping[str, JsonValue]] = []
    for turn in value:
        if not isinstance(turn, Mapping):
            return None
        if "role" not in turn and isinstance(turn.get("value"), str):
            role = SHAREGPT_ROLES.get(str(turn.get("from")))
            if role is None:
                return None
            own = {name: item for name, item in turn.items() if name not in ("from", "value")}
            turn = {"role": role, "content": turn["value"], **own}
        found.append(turn)
    return found


def holds_messages(value: JsonValue) -> bool:
    """Whether a field holds a list of messages, rather than a list of other objects."""
    turns = as_messages(value)
    return turns is not None and all(
        isinstance(turn.get("role"), str) and not PLAIN_OR_CALLS.isdisjoint(turn) for turn in turns
    )


def check_messages(value: JsonValue, source: str, what: str) -> Messages:
    """The messages of a field; ShareGPT's turns with role and content.

    Args:
        value: of the field.
        source: of the row, for messages.
        what: names the field, for messages.

    Raises:
        DataError: it is no list of messages, a message has neither text nor another field, or a part is not text.
    """
    turns = as_messages(value)
    if turns is None or not all(map(_is_message, turns)):
        raise DataError(
            f"{source}: {what} must be a non-empty list of messages "
            f'{{"role": text, "content": text}}, or of turns {{"from": human or gpt, "value": text}}, '
            f"got {str(value)[:80]!r}"
        )
    for number, turn in enumerate(turns, 1):
        _check_parts(turn.get("content"), f"{source}: {what}: message {number}")
    return turns


def _is_message(turn: Mapping[str, JsonValue]) -> bool:
    content = turn.get("content")
    if content is None:  # as in a turn that only calls tools
        return isinstance(turn.get("role"), str) and bool(own_fields(turn))
    return isinstance(turn.get("role"), str) and isinstance(content, str | list | tuple)


def _check_parts(content: JsonValue, where: str) -> None:
    for part in content if isinstance(content, list | tuple) else ():
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or kind != "text" or not isinstance(part.get("text"), str):
            shown = repr(kind) if isinstance(kind, str) else repr(str(part)[:40])
            raise DataError(
                f"{where} holds a part of type {shown}; only text can be trained on: expected parts "
                '{"type": "text", "text": text}. Leave these rows out, or put the text into "content"'
            )


def own_fields(turn: Mapping[str, JsonValue]) -> list[str]:
    """Names of the fields beyond role and content that have a value."""
    return [name for name, value in turn.items() if name not in PLAIN and value is not None]


def content_text(turn: Mapping[str, JsonValue]) -> str:
    """The text of a message; text parts are joined."""
    content = turn.get("content")
    if isinstance(content, list | tuple):
        return "".join(str(part["text"]) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def without_nulls(turn: Mapping[str, JsonValue]) -> dict[str, Any]:
    """A copy without the fields that are null: columnar files give every message the fields of all others."""
    found = {name: value for name, value in turn.items() if value is not None or name in PLAIN}
    if isinstance(content := found.get("content"), list | tuple):
        found["content"] = [
            {name: value for name, value in part.items() if value is not None} for part in content
            if isinstance(part, Mapping)
        ]  # fmt: skip
    return found


def same_messages(first: Messages, second: Messages) -> bool:
    """Whether two lists of messages are equal, apart from fields that are null."""
    return [*map(without_nulls, first)] == [*map(without_nulls, second)]


def common_length(first: Messages, second: Messages) -> int:
    """Number of messages at the beginning that are equal."""
    for at, (one, other) in enumerate(zip(first, second, strict=False)):
        if without_nulls(one) != without_nulls(other):
            return at
    return min(len(first), len(second))


def answer_turn(turns: Messages, source: str, what: str) -> Mapping[str, JsonValue]:
    """The one assistant turn that `turns` hold.

    Raises:
        DataError: another number of turns, or another role; names the row.
    """
    if len(turns) == 1 and turns[0].get("role") == ASSISTANT:
        return turns[0]
    roles = [str(turn.get("role"))[:20] for turn in turns]
    raise DataError(
        f"{source}: {what} must be a text, or one message of the assistant, got {len(turns)} messages of {roles[:8]}; "
        "put the earlier turns into the prompt field, as messages"
    )


def tool_schemas(value: JsonValue) -> Messages | None:
    """A column `tools` as templates take it: a list of JSON schemas, or one as JSON text. None: it is neither;
    empty: it names no tool."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not value:
        return []
    if isinstance(value, list | tuple) and all(isinstance(tool, Mapping) for tool in value):
        return [tool for tool in value if isinstance(tool, Mapping)]
    return None
