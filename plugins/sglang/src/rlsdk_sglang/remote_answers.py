"""Answers of SGLang's schedulers on other nodes, which cannot map this node's memory: signed messages over TCP.

Each answer is one connection: its number and tag, then the message and its tag. The key belongs to the engine, which
sends it to its schedulers with commands. A connection without a valid signature, or for an answer that is not expected,
is closed before its message is read.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from typing import Any

Address = list[Any]
"""Host, port, key, and number of the answer."""
MAX_BYTES = 1 << 30
TALK_S = 60.0
"""Seconds for a message to arrive after its connection was opened."""
LOOK_S = 1.0
_NUMBER_BYTES, _TAG_BYTES = 8, hashlib.sha256().digest_size


class AnswerServer:
    """Listens on an address of this node."""

    def __init__(self, host: str) -> None:
        self._key = secrets.token_bytes(32)
        self._came: dict[int, bytes | None] = {}
        """The expected answers by number."""
        self._changed = threading.Condition()
        self._next = 0
        take = self._take

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                take(self.request, time.monotonic() + TALK_S)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            request_queue_size = 1024
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Ignores errors of connections: the waiting caller reports that no answer arrived."""

        self._server = Server((host, 0), Handler)
        self._host, self._port = host, int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="rlsdk-sglang-mail", daemon=True).start()

    def expect(self) -> RemoteAnswer:
        """Registers an answer that is expected from one scheduler."""
        with self._changed:
            self._next += 1
            self._came[self._next] = None
            return RemoteAnswer(self, [self._host, self._port, self._key.hex(), self._next])

    def wait(self, number: int, wait_s: float, look: Callable[[], None]) -> bytes | None:
        """Waits for the answer with this number, and unregisters it. An exception of `look` ends the wait."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            try:
                while self._came[number] is None and (left := deadline - time.monotonic()) > 0:
                    self._changed.wait(min(left, LOOK_S))
                    look()
                return self._came[number]
            finally:
                del self._came[number]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, connection: socket.socket, deadline: float) -> None:
        head = _received(connection, _NUMBER_BYTES + _TAG_BYTES, deadline)
        number, tag = head[:_NUMBER_BYTES], head[_NUMBER_BYTES:]
        if not hmac.compare_digest(tag, _tag(self._key, number)) or int.from_bytes(number, "big") not in self._came:
            return
        message = _received(connection, MAX_BYTES, deadline)
        tag, data = message[:_TAG_BYTES], message[_TAG_BYTES:]
        if not hmac.compare_digest(tag, _tag(self._key, number + data)):
            return
        with self._changed:
            if int.from_bytes(number, "big") in self._came:
                self._came[int.from_bytes(number, "big")] = data
                self._changed.notify_all()


class RemoteAnswer:
    """One expected answer; same interface as `rlsdk_sglang.messages.Answer`."""

    def __init__(self, server: AnswerServer, address: Address) -> None:
        self._answer_server, self.address = server, address

    def read(self, wait_s: float = 0.0, look: Callable[[], None] = lambda: None) -> tuple[Any, str | None]:
        """Returns the value and the error. `look` is called every second; its exception ends the wait."""
        data = self._answer_server.wait(self.address[3], wait_s, look)
        if data is None:
            return None, f"it gave no answer within {wait_s:g} s"
        found = json.loads(data)
        return found["value"], found["error"]


def send(address: Address, data: bytes) -> None:
    """Called in a scheduler: sends an answer.

    Raises:
        OSError: no server listens at the address.
    """
    host, port, secret, count = address
    key, number = bytes.fromhex(secret), int(count).to_bytes(_NUMBER_BYTES, "big")
    with socket.create_connection((host, port), TALK_S) as connection:
        connection.sendall(number + _tag(key, number) + _tag(key, number + data) + data)


def _received(connection: socket.socket, count: int, deadline: float) -> bytes:
    """The next `count` bytes, or fewer if the other end closes the connection.

    Raises:
        TimeoutError: they did not arrive until `deadline` (monotonic seconds), however they trickle.
    """
    parts = []
    while count > 0:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = connection.recv(min(count, 1 << 20))
        if not part:
            break
        parts.append(part)
        count -= len(part)
        if time.monotonic() > deadline:
            raise TimeoutError
    return b"".join(parts)


def _tag(key: bytes, body: bytes) -> bytes:
    return hmac.new(key, body, hashlib.sha256).digest()
