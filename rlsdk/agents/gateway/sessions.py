"""The open sessions of a gateway, by token."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlsdk.agents.sessions.requests import Refusal
from rlsdk.agents.sessions.session import Session

_REMEMBERED = 65_536
"""Closed sessions that are remembered, so that a late request gets 410 and not 404."""


@dataclass(eq=False)
class OpenSession:
    """One session, and what its agent says of the episode."""

    token: str
    """128 random bits: who knows them may use the session."""
    session: Session
    may_score: bool
    finished: Finish | None = None


@dataclass(frozen=True, kw_only=True)
class Finish:
    """An agent's own end of its episode."""

    reward: float | None
    extra: Mapping[str, Any]


class Sessions:
    """All sessions; used on the gateway's event loop only."""

    def __init__(self, most: int) -> None:
        self._places = asyncio.Semaphore(most)
        self._open: dict[str, OpenSession] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    async def open(self, session: Session, *, may_score: bool) -> OpenSession:
        """Opens a session; waits while there are as many as the gateway may have."""
        await self._places.acquire()
        opened = OpenSession(secrets.token_hex(16), session, may_score)
        self._open[opened.token] = opened
        return opened

    async def close(self, opened: OpenSession) -> None:
        """Ends a session; later requests are refused."""
        if self._open.pop(opened.token, None) is None:
            return
        self._closed[opened.token] = None
        while len(self._closed) > _REMEMBERED:
            self._closed.popitem(last=False)
        self._places.release()
        await opened.session.close()

    def find(self, token: str) -> OpenSession:
        """The session of a token.

        Raises:
            Refusal: there is none, or it is closed.
        """
        if (found := self._open.get(token)) is not None:
            return found
        if token in self._closed:
            raise Refusal("the session is closed: its episode has ended", status=410, code="session_closed")
        raise Refusal(
            "there is no such session; use the base URL and the key of the agent's session, unchanged "
            "(OPENAI_BASE_URL, OPENAI_API_KEY)",
            status=404, code="unknown_session",
        )  # fmt: skip
