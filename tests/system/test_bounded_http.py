"""A server that no client can hold: by reading slowly, by staying, or by numbers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus

from rlsdk.system.bounded_http import BoundedHandler, BoundedServer, ConnectionLimits

LARGE = 64 << 20


class Answers(BoundedHandler):
    """Answers more than the buffers of the system hold, or after a while."""

    def do_GET(self) -> None:  # noqa: N802 - the name that `http.server` calls
        self.server.end_request(self.request)
        if self.path == "/slow":
            time.sleep(3.0)
        self.send(HTTPStatus.OK, "text/plain", bytes(LARGE if self.path == "/large" else 1))


@contextmanager
def serving(limits: ConnectionLimits) -> Iterator[BoundedServer]:
    server = BoundedServer(("127.0.0.1", 0), Answers, limits)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()


def ask(server: BoundedServer, path: str) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=20)
    client.sendall(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    return client


def read(client: socket.socket) -> int:
    """The bytes that still come."""
    received = 0
    with suppress(ConnectionResetError), client:
        while part := client.recv(1 << 20):
            received += len(part)
    return received


def test_an_answer_that_is_read_a_byte_at_a_time_has_a_deadline_as_a_whole() -> None:
    with serving(ConnectionLimits(transfer_s=0.5)) as server:
        client = ask(server, "/large")
        for _ in range(20):
            client.recv(1)
            time.sleep(0.05)
        assert read(client) < LARGE


def test_a_client_that_reads_slowly_is_closed_for_one_more_and_at_the_end() -> None:
    with serving(ConnectionLimits(transfer_s=60.0, connections=2, grace_s=0.2)) as server:
        first, second = ask(server, "/large"), ask(server, "/large")
        for client in (first, second):
            client.recv(1)
        assert read(ask(server, "/")) > 0
        assert read(first) < LARGE
        began = time.monotonic()
    assert time.monotonic() - began < 3.0
    assert read(second) < LARGE


def test_requests_in_progress_are_answered_within_the_grace() -> None:
    with serving(ConnectionLimits(grace_s=20.0)) as server:
        client, silent = ask(server, "/slow"), socket.create_connection(("127.0.0.1", server.server_address[1]))
        time.sleep(0.3)
        began = time.monotonic()
    assert time.monotonic() - began < 10.0
    assert read(client) > 0
    assert read(silent) == 0


def test_a_second_stop_ends_the_grace() -> None:
    with serving(ConnectionLimits(grace_s=60.0)) as server:
        client = ask(server, "/slow")
        time.sleep(0.3)
        server.stop()
        began = time.monotonic()
    assert time.monotonic() - began < 2.5
    assert read(client) == 0


def test_connections_that_are_all_at_work_leave_no_room_for_one_more() -> None:
    with serving(ConnectionLimits(connections=1, grace_s=20.0)) as server:
        client = ask(server, "/slow")
        time.sleep(0.3)
        assert read(ask(server, "/")) == 0
    assert read(client) > 0
