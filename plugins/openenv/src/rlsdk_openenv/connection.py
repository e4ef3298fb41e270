"""The protocol of an OpenEnv server: JSON messages on a WebSocket, a session each.

It is spoken here, and not through OpenEnv's client, whose packages pin versions that clash with those of engines.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

OPEN_S = 10.0
_MOST_BYTES = 100 << 20
"""Of a message; that of OpenEnv's own client."""
_MOST_SCHEMA = 1 << 20


class ServerError(RuntimeError):
    """The server refused a message."""


class Connection:
    """One session."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket

    @classmethod
    async def open(cls, url: str) -> Connection:
        """Connects to the server at `url` (http or https).

        Raises:
            OSError: nothing answers there.
        """
        address = f"ws{url.removeprefix('http').rstrip('/')}/ws"
        return cls(await connect(address, open_timeout=OPEN_S, max_size=_MOST_BYTES, proxy=None))

    async def ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Sends a message; returns the data of its answer.

        Raises:
            ServerError: the server refused it.
            websockets.ConnectionClosed: the session is lost.
        """
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self._socket.recv())
        said = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(said, dict):
            raise ServerError(f"the server answered {kind!r} with {str(answer)[:200]!r}")
        if answer.get("type") == "error":
            raise ServerError(f"{said.get('message', 'no reason given')} ({said.get('code', 'no code')})")
        return said

    async def close(self) -> None:
        """Ends the session."""
        await self._socket.close()


def action_schema(url: str) -> dict[str, Any]:
    """JSON schema of the server's actions. Raises OSError or ValueError."""
    with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=OPEN_S) as answer:
        schema = json.loads(answer.read(_MOST_SCHEMA)).get("action")
    if not isinstance(schema, dict):
        raise ValueError(f"{url}/schema describes no action")
    return schema
