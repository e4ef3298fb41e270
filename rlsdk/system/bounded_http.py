"""An HTTP server that no client can hold: limits on the time, number and bytes of requests, and an end after a short
grace.

A connection carries one request. While the request arrives, and while the client reads the answer, the connection has a
deadline for the whole of it, so a client gains nothing by sending or reading a byte now and then. When there are too
many connections, or too many bytes of requests that are not complete, the oldest or the largest of them is closed: new
clients are served, whatever the others do.
"""

from __future__ import annotations

import io
import logging
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlsdk.system.printable import printable

_log = logging.getLogger(__name__)
_SWEEP_S = 0.1
"""Seconds between checks of the deadlines."""


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """What the clients of a server may use."""

    transfer_s: float = 30.0
    """Seconds for a whole request to arrive, headers and body, and for the whole answer to be read."""
    connections: int = 256
    """Number of connections; for one more, the oldest in transfer is closed."""
    request_bytes: int = 1 << 30
    """Bytes of all requests that are not complete; for more, the largest of these is closed."""
    grace_s: float = 5.0
    """Seconds that complete requests have to be answered after `stop`."""


class _Phase(Enum):
    RECEIVING = "the request arrives"
    WORKING = "the answer is computed"
    ANSWERING = "the answer is sent"


class _Connection:
    """One client. Its socket is closed by the thread that serves it."""

    def __init__(self, client: socket.socket) -> None:
        self._client = client
        self.received = 0
        """Bytes of its request, until the request is complete."""
        self.is_cut = False
        self.enter(_Phase.RECEIVING)

    def enter(self, phase: _Phase) -> None:
        self.phase = phase
        self.since = time.monotonic()

    @property
    def in_transfer(self) -> bool:
        """Whether it waits for its client."""
        return self.phase is not _Phase.WORKING and not self.is_cut

    def cut(self) -> None:
        """Ends all reads and writes of its thread."""
        self.is_cut = True
        with suppress(OSError):  # the client has disconnected
            self._client.shutdown(socket.SHUT_RDWR)


class BoundedServer(ThreadingHTTPServer):
    """Serves each connection on its own thread; handlers are `BoundedHandler`s."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], handler: type[BoundedHandler], limits: ConnectionLimits | None = None
    ) -> None:
        """Listens; `serve` answers.

        Raises:
            OSError: it cannot listen on the address.
        """
        self.limits = limits or ConnectionLimits()
        self._open: dict[socket.socket, _Connection] = {}
        self._lock = threading.Lock()
        self._received = 0
        self._stops = 0
        super().__init__(address, handler)

    def serve(self) -> None:
        """Answers requests until `stop`.

        Then it closes connections whose request is not complete, and gives the others `grace_s`.
        """
        try:
            self.serve_forever(poll_interval=_SWEEP_S)
        finally:
            self.server_close()
            self._end_connections()

    def stop(self) -> None:
        """Makes `serve` return, for a second call without grace. From any thread, and from a signal handler."""
        self._stops += 1
        threading.Thread(target=self.shutdown, daemon=True).start()

    def count_received(self, client: socket.socket, num_bytes: int) -> None:
        """Counts bytes of a request that is not complete, and makes room for them.

        Raises:
            ConnectionError: the connection was cut.
        """
        with self._lock:
            connection = self._open[client]
            if connection.is_cut:
                raise ConnectionAbortedError
            connection.received += num_bytes
            self._received += num_bytes
            while self._received > self.limits.request_bytes:
                self._cut(max(self._in_transfer(), key=lambda other: other.received))

    def end_request(self, client: socket.socket) -> None:
        """The whole request of this client has arrived."""
        self._enter(client, _Phase.WORKING)

    def begin_answer(self, client: socket.socket) -> None:
        """The answer for this client is complete, and is sent now."""
        self._enter(client, _Phase.ANSWERING)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if sum(not one.is_cut for one in self._open.values()) >= self.limits.connections:
                waiting = self._in_transfer()
                if not waiting:
                    request.close()
                    return
                self._cut(min(waiting, key=lambda other: other.since))
            self._open[request] = _Connection(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            connection = self._open.pop(request, None)
            if connection is not None:
                self._forget_bytes(connection)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cuts the connections whose time is over."""
        began = time.monotonic() - self.limits.transfer_s
        with self._lock:
            for connection in self._in_transfer():
                if connection.since < began:
                    self._cut(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs an error outside of the answer; that a client has disconnected is none."""
        if not isinstance(sys.exc_info()[1], OSError):
            _log_error()

    def _enter(self, client: socket.socket, phase: _Phase) -> None:
        with self._lock:
            self._open[client].enter(phase)
            self._forget_bytes(self._open[client])

    def _in_transfer(self) -> list[_Connection]:
        return [one for one in self._open.values() if one.in_transfer]

    def _cut(self, connection: _Connection) -> None:
        connection.cut()
        self._forget_bytes(connection)

    def _forget_bytes(self, connection: _Connection) -> None:
        self._received -= connection.received
        connection.received = 0

    def _end_connections(self) -> None:
        deadline = time.monotonic() + self.limits.grace_s
        is_over = False
        while not is_over:
            is_over = self._stops > 1 or time.monotonic() > deadline
            with self._lock:
                for connection in self._open.values():
                    if is_over or connection.phase is _Phase.RECEIVING:
                        self._cut(connection)
                is_over |= not self._open
            time.sleep(0.0 if is_over else 0.01)


class _Received(io.RawIOBase):
    """The bytes of a request, counted as they arrive."""

    def __init__(self, client: socket.socket, count: Callable[[socket.socket, int], None]) -> None:
        self._client = client
        self._count = count

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        received = self._client.recv_into(buffer)
        self._count(self._client, received)
        return received


class BoundedHandler(BaseHTTPRequestHandler):
    """Handles one request, then closes the connection. An unexpected error is logged, and answered with status 500."""

    protocol_version = "HTTP/1.1"
    server_version = "rlsdk"
    sys_version = ""
    server: BoundedServer
    is_answered = False

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Received(self.request, self.server.count_received))

    def handle(self) -> None:
        try:
            self.handle_one_request()
        except OSError:
            pass  # the client has disconnected, or was cut
        except BaseException as error:
            _log_error()
            if not self.is_answered:
                self.answer_error(error)

    def answer_error(self, error: BaseException) -> None:
        """Answers an unexpected error."""
        text = f"unexpected {type(error).__name__}; the log of this server has the details\n"
        self.send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", text.encode())

    def send(self, status: HTTPStatus, kind: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Sends an answer of content type `kind`."""
        self.server.begin_answer(self.request)
        self.is_answered = True
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs no requests; errors are in the answer."""


def _log_error() -> None:
    _log.error("unexpected error of a request\n%s", printable(traceback.format_exc()))
