"""HTTP services on the loopback that do what they should, or the faults that a path names."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[["Handler", dict[str, Any]], None]


@dataclass
class Service:
    """Where it listens, and what it was asked."""

    base: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    attempts: int = 0


class Handler(BaseHTTPRequestHandler):
    service: Service
    answers: dict[str, Answer]

    def do_POST(self) -> None:
        self.service.attempts += 1
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.service.requests.append(body)
        self.service.headers.append(dict(self.headers))
        self.answers[self.path](self, body)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def send(self, body: Any, status: int = 200, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def lengths(handler: Handler, body: dict[str, Any]) -> None:
    """The length of the response, as scores; nothing for an empty one, and an error where it says so."""
    results: list[dict[str, Any]] = []
    for sample in body["samples"]:
        text, ids = sample["response"], sample["response_ids"]
        if text == "error":
            results.append({"error": "this one cannot be graded"})
        elif text == "nan":
            results.append({"score": float("nan")})
        elif not text:
            results.append({"score": None})
        else:
            tokens = None if ids is None else [float(token) for token in ids]
            results.append({"score": len(text), "token_scores": tokens, "metrics": {"chars": len(text)}})
    handler.send({"results": results})


def fails_twice(handler: Handler, body: dict[str, Any]) -> None:
    if handler.service.attempts <= 2:
        handler.send({"error": "not yet"}, 503)
    else:
        lengths(handler, body)


def drops_once(handler: Handler, body: dict[str, Any]) -> None:
    if handler.service.attempts == 1:
        handler.connection.shutdown(2)
    else:
        lengths(handler, body)


def no_bad(handler: Handler, body: dict[str, Any]) -> None:
    """Fails whole requests because of a sample in them: its response says how."""
    faults = [sample["response"].removeprefix("bad ") for sample in body["samples"] if "bad" in sample["response"]]
    if not faults:
        lengths(handler, body)
    elif faults[0] == "drop":
        handler.connection.shutdown(2)
    else:
        handler.send({"error": "cannot take this"}, int(faults[0]))


def busy_once(handler: Handler, body: dict[str, Any]) -> None:
    if handler.service.attempts == 1:
        handler.send({}, 429, Retry_After="1")
    else:
        lengths(handler, body)


def drips(handler: Handler, body: dict[str, Any]) -> None:
    """A byte now and then: every single wait is short."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(1200):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


def floods(handler: Handler, body: dict[str, Any]) -> None:
    """Without a length, until nobody listens."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(1 << 12):
        handler.wfile.write(b" " * (1 << 16))


FAULTS: dict[str, Answer] = {
    "/score": lengths,
    "/fails-twice": fails_twice,
    "/drops-once": drops_once,
    "/no-bad": no_bad,
    "/busy-once": busy_once,
    "/401": lambda handler, body: handler.send({}, 401),
    "/429": lambda handler, body: handler.send({}, 429),
    "/drips": drips,
    "/floods": floods,
    "/drops": lambda handler, body: handler.connection.shutdown(2),
    "/500": lambda handler, body: handler.send({"error": "a secret place" * 100}, 500),
    "/404": lambda handler, body: handler.send({"error": "no such thing"}, 404),
    "/redirect": lambda handler, body: handler.send({}, 307, Location="http://example.invalid/score"),
    "/gzip": lambda handler, body: handler.send(b"\x1f\x8b", Content_Encoding="gzip"),
    "/html": lambda handler, body: handler.send(b"<html>hello</html>"),
    "/deep": lambda handler, body: handler.send(b"[" * 100_000),
    "/list": lambda handler, body: handler.send([1.0]),
    "/text": lambda handler, body: handler.send({"results": [{"score": "1.0"}] * len(body["samples"])}),
    "/unknown": lambda handler, body: handler.send({"results": [{"scores": 1.0}] * len(body["samples"])}),
    "/fewer": lambda handler, body: handler.send({"results": []}),
}


class Quiet(ThreadingHTTPServer):
    """Clients that go away are what is tested."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


@contextmanager
def serving() -> Iterator[Service]:
    """A service on a free port, with a path for every fault."""
    handler = type("Bound", (Handler,), {"answers": FAULTS})
    server = Quiet(("127.0.0.1", 0), handler)
    handler.service = Service(f"http://127.0.0.1:{server.server_address[1]}")  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield handler.service  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
