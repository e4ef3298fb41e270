"""Histories compared by meaning: clients write the turns that they got in their own way.

Of eight clients that call tools three write the arguments of a call anew and three drop its reasoning. So a message is
its role, its text, its calls with equal arguments, and the call that it answers; nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlsdk.interfaces import AssistantMessage, Message, Tool


def chain(tools: Sequence[Tool], messages: Sequence[Message]) -> list[bytes]:
    """A key for each beginning of a chat: equal keys have equal tools and messages of equal meaning.

    Returns:
        One more than messages: at `i` that of the first `i` messages.
    """
    keys = [_digest(b"", [dict(tool) for tool in tools])]
    for message in messages:
        keys.append(extended(keys[-1], message))
    return keys


def extended(key: bytes, message: Message) -> bytes:
    """The key of a chat with one more message."""
    return _digest(key, _meaning(message))


def text_of(content: Any) -> str:
    """The text of a message's content: parts are joined, None is empty."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def as_sent(answer: AssistantMessage) -> dict[str, Any]:
    """A turn of the model as clients get it."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
            }
            for call in answer.calls
        ]
    return message if answer.reasoning is None else {**message, "reasoning_content": answer.reasoning}


def _meaning(message: Message) -> list[Any]:
    calls = [
        [call.get("id"), call["function"]["name"], call["function"]["arguments"]]
        for call in message.get("tool_calls") or ()
    ]
    return [message["role"], text_of(message.get("content")), calls, message.get("tool_call_id")]


def _digest(before: bytes, value: Any) -> bytes:
    return hashlib.blake2b(before + _written(value).encode(), digest_size=16).digest()


_written = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
