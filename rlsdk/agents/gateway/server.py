"""The gateway's HTTP server: uvicorn, on a thread of its own, in the process that samples."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Collection

from rlsdk.agents.gateway.app import GatewayApp
from rlsdk.agents.gateway.loop_thread import LoopThread
from rlsdk.agents.gateway.sessions import OpenSession, Sessions
from rlsdk.agents.sessions.session import Session
from rlsdk.interfaces import ConfigError

_START_S = 30.0
_STOP_S = 5.0
_KEEP_ALIVE_S = 120
"""Seconds that an idle connection stays open: longer than clients keep one, so that none is closed as it is used."""
_BACKLOG = 4096
_WHOLE_COLLECTIONS = 100
"""Middle collections of the garbage collector between whole ones, which stop everything for tens of milliseconds where
thousands of sessions are open; Python's own number is 10, and a burst of new sessions brings several."""


class Gateway:
    """Serves sessions over HTTP."""

    def __init__(
        self, *, host: str = "127.0.0.1", port: int = 0, max_sessions: int = 4096, lenient: Collection[str] = ()
    ) -> None:
        """Starts the server.

        Args:
            host: address to listen at.
            port: 0: any free one.
            max_sessions: most open sessions; further ones wait.
            lenient: see `GatewayApp`.

        Raises:
            ConfigError: the address cannot be listened at.
        """
        import uvicorn  # here: runs without agents start sooner

        self._socket = _listen(host, port)
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        self._thread = LoopThread("rlsdk-gateway")
        self._sessions = Sessions(max_sessions)
        config = uvicorn.Config(
            GatewayApp(self._sessions, frozenset(lenient)), log_config=None, access_log=False, lifespan="off",
            ws="none", server_header=False, date_header=False, timeout_keep_alive=_KEEP_ALIVE_S, backlog=_BACKLOG,
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._collects = gc.get_threshold()
        gc.set_threshold(*self._collects[:2], max(self._collects[2], _WHOLE_COLLECTIONS))
        self._thread.wait(self._start(), _START_S)

    async def open(self, session: Session, *, may_score: bool = False) -> OpenSession:
        """Opens a session; waits while there are too many. May be called from any loop."""
        return await self._thread.run(self._sessions.open(session, may_score=may_score))

    async def close_session(self, opened: OpenSession) -> None:
        """Closes a session; its calls end. May be called from any loop."""
        await self._thread.run(self._sessions.close(opened))

    def base_url(self, opened: OpenSession) -> str:
        """Where the agent of a session sends its requests."""
        return f"{self.url}/sessions/{opened.token}/v1"

    def close(self) -> None:
        """Ends the server. Safe to call twice."""
        if self._serving.done():
            return
        self._thread.wait(self._stop(), _START_S)
        self._thread.close()
        self._socket.close()
        gc.set_threshold(*self._collects)

    async def _stop(self) -> None:
        self._server.should_exit = True
        await asyncio.wait({self._serving}, timeout=_STOP_S)

    async def _start(self) -> None:
        self._serving = asyncio.create_task(self._server.serve([self._socket]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.005)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"gateway.host {host!r}, gateway.port {port}: cannot listen there: {error.strerror}; port 0 takes a free "
            "one"
        ) from error
    return listening
