"""A reward as a service: the server of `rlsdk reward serve`, with the protocol of `rlsdk.rewards.service`."""

from __future__ import annotations

import hmac
import ipaddress
import json
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pydantic import ValidationError

from rlsdk.interfaces import ConfigError, RewardSample, RlsdkError
from rlsdk.rewards.results import RewardResult, failures_of
from rlsdk.rewards.runner import RewardRunner
from rlsdk.rewards.service import HEALTH_PATH, SCORE_PATH, VERSION, ScoreReply, ScoreRequest, SentScore, describe


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
    """Maximum number of concurrent requests; further ones get status 503."""
    timeout_s: float = 30.0
    """Seconds after which a silent connection is closed."""


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
        """Answers requests until `stop` is called, then finishes those in progress."""
        try:
            self._http.serve_forever(poll_interval=0.1)
        finally:
            self._http.server_close()

    def stop(self) -> None:
        """Makes `run` return. May be called from any thread, and from a signal handler."""
        threading.Thread(target=self._http.shutdown, daemon=True).start()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def score_all(runner: RewardRunner, samples: list[RewardSample]) -> ScoreReply:
    """Grades samples, and returns one result for each."""
    result = runner.score(samples)
    reasons = failures_of(result)
    return ScoreReply(results=[_result(result, at, reasons[at]) for at in range(len(samples))])


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


class _Server(ThreadingHTTPServer):
    """One thread per connection; closing waits for them."""

    daemon_threads = False
    allow_reuse_address = True

    def __init__(self, service: RewardServer) -> None:
        self.service = service
        options = service.options
        self.address_family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        super().__init__((options.host, options.port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that disconnected."""


class _Handler(BaseHTTPRequestHandler):
    """Handles one request, then closes the connection."""

    protocol_version = "HTTP/1.1"
    server_version = "rlsdk"
    sys_version = ""
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.service.options.timeout_s)

    def do_GET(self) -> None:
        self._answer(self._health)

    def do_POST(self) -> None:
        self._answer(self._score)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing; errors are in the response."""

    def _answer(self, make: Any) -> None:
        self.close_connection = True
        slots = self.server.service.slots
        if not slots.acquire(blocking=False):
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "too many concurrent requests; try again"})
            return
        try:
            self._send(HTTPStatus.OK, make())
        except _RefusedError as refused:
            self._send(refused.status, {"error": str(refused)})
        except (RlsdkError, CancelledError) as error:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"the reward cannot be run: {error}"})
        except OSError:
            return  # the client disconnected, or was silent for too long
        finally:
            slots.release()

    def _health(self) -> Mapping[str, Any]:
        if self.path != HEALTH_PATH:
            raise _RefusedError(HTTPStatus.NOT_FOUND, f"there is no {self.path!r}; expected {HEALTH_PATH}")
        (reward,) = self.server.service.runner.rewards
        return {"status": "ok", "reward": reward.name, "version": VERSION}

    def _score(self) -> ScoreReply:
        if self.path != SCORE_PATH:
            raise _RefusedError(HTTPStatus.NOT_FOUND, f"there is no {self.path!r}; post to {SCORE_PATH}")
        self._check_token()
        # Web pages can post other content types to this machine without a preflight request.
        if self.headers.get_content_type() != "application/json":
            raise _RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "expected Content-Type: application/json")
        try:
            request = ScoreRequest.model_validate_json(self.rfile.read(self._length()))
        except ValidationError as error:
            raise _RefusedError(
                HTTPStatus.UNPROCESSABLE_ENTITY, f"not a request for scores: {describe(error)}"
            ) from error
        if request.version != VERSION:
            raise _RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, f"version {request.version}; expected {VERSION}")
        most = self.server.service.options.max_samples
        if len(request.samples) > most:
            raise _RefusedError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{len(request.samples)} samples; expected at most {most}"
            )
        return score_all(self.server.service.runner, [sample.to_sample() for sample in request.samples])

    def _check_token(self) -> None:
        token = self.server.service.options.token
        given = self.headers.get("Authorization", "")
        if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise _RefusedError(HTTPStatus.UNAUTHORIZED, "expected Authorization: Bearer TOKEN")

    def _length(self) -> int:
        """Returns the length of the body in bytes."""
        text = self.headers.get("Content-Length", "")
        if not text.isascii() or not text.isdigit():
            raise _RefusedError(HTTPStatus.LENGTH_REQUIRED, "expected a Content-Length")
        most = self.server.service.options.max_request_bytes
        if len(text) > 18 or int(text) > most:
            raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"more than {most} bytes")
        return int(text)

    def _send(self, status: HTTPStatus, body: Mapping[str, Any] | ScoreReply) -> None:
        data = body.model_dump_json().encode() if isinstance(body, ScoreReply) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)
