"""A reward as a service: the server of `rlsdk reward serve`, with the protocol of `rlsdk.rewards.services.messages`."""

from __future__ import annotations

import hmac
import ipaddress
import json
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from http import HTTPStatus

from rlsdk.interfaces import ConfigError, RlsdkError
from rlsdk.rewards.grading.runner import RewardRunner
from rlsdk.rewards.scores.results import RewardResult, failures_of
from rlsdk.rewards.services.messages import (
    HEALTH_PATH,
    SCORE_PATH,
    VERSION,
    SentSample,
    SentScore,
    encode_reply,
    read_request,
)
from rlsdk.system.bounded_http import BoundedHandler, BoundedServer, ConnectionLimits


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Address of a reward service, and limits on requests."""

    host: str = "127.0.0.1"
    port: int = 8700
    """Port; 0: any free port."""
    token: str | None = None
    """Token that clients must send (`Authorization: Bearer TOKEN`); None: every client that can connect is served."""
    max_request_bytes: int = 64 << 20
    max_samples: int = 1024
    """Maximum number of samples in one request."""
    max_requests: int = 16
    """Maximum number of requests that are graded at once; further ones get status 503."""
    max_connections: int = 256
    """Maximum number of connections; for one more, the one is closed that has been sending or reading for longest."""
    timeout_s: float = 30.0
    """Seconds for a whole request to arrive, headers and body, and for the client to read the whole answer."""
    grace_s: float = 5.0
    """Seconds that requests in progress get at the end."""


class RewardServer:
    """HTTP server of one reward. Samples are graded in the runner's processes, confined as in a run."""

    def __init__(self, runner: RewardRunner, options: ServeOptions) -> None:
        """Starts listening; `run` answers requests.

        Args:
            runner: runner of exactly one reward; the caller closes it.
            options: address and limits.

        Raises:
            ConfigError: the address is in use or invalid, or other machines can reach it and there is no token.
        """
        if options.token is None and not is_loopback(options.host):
            raise ConfigError(
                f"--host {options.host}: other machines can reach this address, so it needs a token; name the "
                "environment variable that holds one, --token-env REWARD_TOKEN, or listen on 127.0.0.1"
            )
        self.runner = runner
        self.options = options
        self.slots = threading.BoundedSemaphore(options.max_requests)
        try:
            self._http = _Server(self)
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ConfigError(
                f"--port {options.port}: cannot listen on {options.host}: {why}; give another port, or 0 for any"
            ) from error

    @property
    def url(self) -> str:
        """URL to which clients post samples."""
        host, port = self._http.server_address[:2]
        name = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{name}:{port}{SCORE_PATH}"

    def run(self) -> None:
        """Answers requests until `stop` is called. Then those in progress have `grace_s`, whatever clients do."""
        self._http.serve()

    def stop(self) -> None:
        """Makes `run` return; called twice, without grace. May be called from any thread, and from a signal handler."""
        self._http.stop()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def score_all(runner: RewardRunner, entries: Sequence[SentSample | str]) -> bytes:
    """Grades samples, and returns the body of the reply: one result for each.

    Args:
        runner: runner of one reward.
        entries: samples, and reasons why one cannot be graded.
    """
    samples = [one.to_sample() for one in entries if not isinstance(one, str)]
    result = runner.score(samples)
    reasons = failures_of(result)
    graded = iter(range(len(samples)))
    results = [
        SentScore(error=one) if isinstance(one, str) else _result(result, at := next(graded), reasons[at])
        for one in entries
    ]
    return encode_reply(results)


def _result(result: RewardResult, at: int, reasons: Sequence[tuple[str, str, str]]) -> SentScore:
    (name,) = result.weights
    metrics = {key.rpartition("/")[2]: value for key, value in result.metrics.get(at, {}).items()}
    if result.failed[name][at]:
        kind, _, message = reasons[0]
        return SentScore(error=f"{kind}: {message}" if message else kind)
    if not result.graded[name][at]:
        return SentScore(score=None, metrics=metrics)
    tokens = result.token_scores.get(at)
    return SentScore(
        score=float(result.by_reward[name][at]),
        token_scores=None if tokens is None else tokens.tolist(),
        metrics=metrics,
    )


class _RefusedError(Exception):
    """A refused request, with its HTTP status."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Server(BoundedServer):
    """The HTTP side of one service."""

    def __init__(self, service: RewardServer) -> None:
        self.service = service
        options = service.options
        self.address_family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        limits = ConnectionLimits(
            transfer_s=options.timeout_s,
            connections=options.max_connections,
            request_bytes=options.max_requests * options.max_request_bytes,
            grace_s=options.grace_s,
        )
        super().__init__((options.host, options.port), _Handler, limits)


class _Handler(BoundedHandler):
    """Answers `GET /health` and `POST /score`."""

    server: _Server

    def do_GET(self) -> None:  # noqa: N802 - the name that `http.server` calls
        self._answer(self._health)

    def do_POST(self) -> None:  # noqa: N802 - the name that `http.server` calls
        self._answer(self._score)

    def answer_error(self, error: BaseException) -> None:
        why = f"unexpected {type(error).__name__}; the log of the service has the details"
        self._send(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": why})

    def _answer(self, make: Callable[[], bytes]) -> None:
        try:
            data = make()
        except _RefusedError as refused:
            self._send(refused.status, {"error": str(refused)})
        except (RlsdkError, CancelledError) as error:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"the reward cannot be run: {error}"})
        else:
            self.send(HTTPStatus.OK, "application/json", data)

    def _health(self) -> bytes:
        if self.path != HEALTH_PATH:
            raise _RefusedError(HTTPStatus.NOT_FOUND, f"there is no {self.path!r}; expected {HEALTH_PATH}")
        (reward,) = self.server.service.runner.rewards
        return json.dumps({"status": "ok", "reward": reward.name, "version": VERSION}).encode()

    def _score(self) -> bytes:
        self._check_head()
        length = self._length()
        data = self.rfile.read(length)
        if len(data) < length:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, f"{len(data)} bytes; Content-Length says {length}")
        self.server.end_request(self.request)
        # Clients that are still sending take no slot: they could keep it.
        slots = self.server.service.slots
        if not slots.acquire(blocking=False):
            raise _RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "too many concurrent requests; try again")
        try:
            return self._grade(data)
        finally:
            slots.release()

    def _grade(self, data: bytes) -> bytes:
        try:
            version, samples = read_request(data)
        except ValueError as error:
            raise _RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, f"not a request for scores: {error}") from error
        if version != VERSION:
            raise _RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, f"version {version}; expected {VERSION}")
        most = self.server.service.options.max_samples
        if len(samples) > most:
            raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{len(samples)} samples; expected at most {most}")
        return score_all(self.server.service.runner, samples)

    def _check_head(self) -> None:
        if self.path != SCORE_PATH:
            raise _RefusedError(HTTPStatus.NOT_FOUND, f"there is no {self.path!r}; post to {SCORE_PATH}")
        token = self.server.service.options.token
        header = self.headers.get("Authorization", "")
        if token is not None and not hmac.compare_digest(header.encode(), f"Bearer {token}".encode()):
            raise _RefusedError(HTTPStatus.UNAUTHORIZED, "expected Authorization: Bearer TOKEN")
        # Web pages can post other content types to this machine without a preflight request.
        if self.headers.get_content_type() != "application/json":
            raise _RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "expected Content-Type: application/json")

    def _length(self) -> int:
        """Returns the length of the body in bytes."""
        text = self.headers.get("Content-Length", "")
        if not text.isascii() or not text.isdigit():
            raise _RefusedError(HTTPStatus.LENGTH_REQUIRED, "expected a Content-Length")
        most = self.server.service.options.max_request_bytes
        if len(text) > 18 or int(text) > most:
            raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"more than {most} bytes")
        return int(text)

    def _send(self, status: HTTPStatus, body: Mapping[str, str]) -> None:
        self.send(status, "application/json", json.dumps(body).encode())
