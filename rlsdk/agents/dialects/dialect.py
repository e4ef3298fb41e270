"""What a dialect is."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rlsdk.agents.sessions.requests import Answer, Ask, Refusal


@dataclass(frozen=True, kw_only=True)
class Form:
    """How an answer is written."""

    streams: bool = False
    includes_usage: bool = False
    includes_token_ids: bool = False
    model: str = ""
    created: int = 0
    """Seconds since the epoch."""
    echo: Mapping[str, Any] | None = None
    """Fields of the request that its answer repeats."""


class Dialect(Protocol):
    """One endpoint: its requests read, its answers written."""

    def read(self, body: Mapping[str, Any], lenient: Collection[str]) -> tuple[Ask, Form]:
        """Reads a request.

        Args:
            body: the JSON object.
            lenient: names of unknown fields to ignore.

        Raises:
            Refusal: a field cannot be used; names it.
        """
        ...

    def whole(self, answer: Answer, form: Form) -> Mapping[str, Any]:
        """The JSON object of an answer."""
        ...

    def events(self, answer: Answer, form: Form) -> Iterator[bytes]:
        """The server-sent events of an answer."""
        ...

    def error(self, refusal: Refusal) -> Mapping[str, Any]:
        """The JSON object of a refusal."""
        ...


def sse(data: Mapping[str, Any], event: str | None = None) -> bytes:
    """One server-sent event."""
    name = "" if event is None else f"event: {event}\n"
    return f"{name}data: {json.dumps(data)}\n\n".encode()
