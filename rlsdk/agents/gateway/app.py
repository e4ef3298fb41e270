"""The gateway as an ASGI application: routes, limits on requests, answers as JSON or as events."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

from rlsdk.agents.dialects.anthropic_messages import AnthropicMessages
from rlsdk.agents.dialects.chat import ChatCompletions
from rlsdk.agents.dialects.dialect import Dialect, Form, sse
from rlsdk.agents.dialects.responses import Responses
from rlsdk.agents.gateway.sessions import Finish, OpenSession, Sessions
from rlsdk.agents.sessions.requests import Answer, Refusal

MODEL = "policy"
"""Name of the one model."""
MAX_BODY_BYTES = 32 * 1024**2
BODY_S = 60.0
"""Seconds for the whole body of a request to arrive."""
KEEP_ALIVE_S = 15.0
"""Seconds of silence of a stream before a comment is sent, so that clients do not give up."""
DIALECTS: Mapping[str, Dialect] = {
    "chat/completions": ChatCompletions(),
    "responses": Responses(),
    "messages": AnthropicMessages(),
}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True)
class _Route:
    token: str
    action: str
    """What follows `/v1/`."""


class GatewayApp:
    """The ASGI application."""

    def __init__(self, sessions: Sessions, lenient: Collection[str] = ()) -> None:
        """`lenient`: fields of requests that are ignored although they are not known."""
        self._sessions = sessions
        self._lenient = lenient

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        dialect: Dialect = DIALECTS["chat/completions"]
        try:
            route = _route(scope)
            dialect = DIALECTS.get(route.action, dialect)
            await self._dispatch(route, scope["method"], _Exchange(scope, receive, send))
        except Refusal as refusal:
            await _send_json(send, refusal.status, dialect.error(refusal))
        except _ClientLeft:
            pass

    async def _dispatch(self, route: _Route, method: str, exchange: _Exchange) -> None:
        opened = self._sessions.find(route.token)
        if route.action == "models" and method == "GET":
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rlsdk"}
            await _send_json(exchange.send, 200, {"object": "list", "data": [model]})
        elif route.action in DIALECTS and method == "POST":
            await self._answer(opened, route.action, exchange)
        elif route.action == "finish" and method == "POST":
            _finish(opened, _json_object(await exchange.body()))
            await _send_json(exchange.send, 200, {"finished": True})
        else:
            raise Refusal(
                f"{method} /v1/{route.action}: expected POST {', POST '.join(DIALECTS)} or GET models",
                status=404, code="unknown_url",
            )  # fmt: skip

    async def _answer(self, opened: OpenSession, action: str, exchange: _Exchange) -> None:
        raw = await exchange.body()
        dialect = DIALECTS[action]
        ask, form = dialect.read(_json_object(raw), self._lenient)
        form = replace(form, model=MODEL, created=int(time.time()))
        digest = hashlib.blake2b(action.encode() + raw, digest_size=16).digest()
        pending = opened.session.request(ask, digest, is_retry=exchange.is_retry)
        try:
            await self._deliver(dialect, form, pending.answer, exchange)
        except BaseException:
            if exchange.client_left:
                pending.lose()
            raise
        finally:
            exchange.end()

    async def _deliver(
        self, dialect: Dialect, form: Form, answering: asyncio.Future[Answer], exchange: _Exchange
    ) -> None:
        """Sends an answer once it is there. A stream is kept alive meanwhile, and is written at its end.

        Raises:
            _ClientLeft: nobody reads the answer.
        """
        begun = False
        while not await exchange.wait(answering, KEEP_ALIVE_S):
            if form.streams:
                if not begun:
                    await _begin_events(exchange.send)
                    begun = True
                await exchange.send_part(b": keep-alive\n\n", more=True)
        try:
            answer = _result(answering)
        except Refusal as refusal:
            if not begun:
                raise
            await exchange.send_part(sse(dialect.error(refusal)), more=False)
            return
        if form.streams:
            if not begun:
                await _begin_events(exchange.send)
            await exchange.send_part(b"".join(dialect.events(answer, form)), more=False)
        else:
            await _send_json(exchange.send, 200, dialect.whole(answer, form))


def _result(answering: asyncio.Future[Answer]) -> Answer:
    """The answer.

    Raises:
        Refusal: there is none.
    """
    try:
        return answering.result()
    except asyncio.CancelledError:
        raise Refusal("the session was closed: its episode has ended", status=410, code="session_closed") from None
    except Refusal:
        raise
    except Exception as error:
        raise Refusal(f"the run cannot sample: {error}", status=500, kind="server_error") from error


class _ClientLeft(Exception):  # noqa: N818
    """Nobody reads the answer."""


class _Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self.send = send
        retries = _header(scope, b"x-stainless-retry-count")
        self.is_retry = retries is not None and retries.isdigit() and int(retries) > 0
        self.client_left = False
        self._leaving: asyncio.Task[None] | None = None

    async def body(self) -> bytes:
        """The request's body.

        Raises:
            Refusal: it is too large, or does not arrive in time.
        """
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientLeft
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > MAX_BODY_BYTES:
                        raise Refusal(f"the request has more than {MAX_BODY_BYTES} bytes", status=413)
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise Refusal(f"the request did not arrive within {BODY_S:g} s", status=408) from None

    async def wait(self, answering: asyncio.Future[Answer], timeout_s: float) -> bool:
        """Waits for an answer; whether it is there.

        Raises:
            _ClientLeft: nobody waits for it any more.
        """
        if self._leaving is None:
            self._leaving = asyncio.ensure_future(self._leave())
        waiting: set[asyncio.Future[Any]] = {answering, self._leaving}
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self.client_left:
            raise _ClientLeft
        return answering.done()

    def end(self) -> None:
        if self._leaving is not None:
            self._leaving.cancel()

    async def send_part(self, data: bytes, *, more: bool) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def _leave(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.client_left = True


def _route(scope: Scope) -> _Route:
    """The session and action of a path: `/sessions/TOKEN/v1/ACTION`, or `/v1/ACTION` with the token as the key."""
    parts = str(scope["path"]).strip("/").split("/")
    if parts[:1] == ["sessions"] and parts[2:3] == ["v1"]:
        return _Route(parts[1], "/".join(parts[3:]))
    if parts[:1] != ["v1"]:
        raise Refusal(
            f"{scope['path'][:80]}: expected /sessions/ID/v1/chat/completions or /v1/chat/completions",
            status=404, code="unknown_url",
        )  # fmt: skip
    key = _header(scope, b"authorization") or ""
    token = key[7:] if key[:7].lower() == "bearer " else _header(scope, b"x-api-key") or ""
    return _Route(token.strip(), "/".join(parts[1:]))


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name), None)


def _json_object(raw: bytes) -> Mapping[str, Any]:
    try:
        body = json.loads(raw)
        if b"\\ud" in raw.lower():  # half of a character, which no tokenizer takes
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is not JSON in UTF-8: {error}"[:200], code="invalid_json") from None
    if not isinstance(body, dict):
        raise Refusal(f"the body is a {type(body).__name__}: expected a JSON object", code="invalid_json")
    return body


def _finish(opened: OpenSession, body: Mapping[str, Any]) -> None:
    reward, extra = body.get("reward"), body.get("extra") or {}
    if not opened.may_score and reward is not None:
        raise Refusal(
            "reward: an agent may not score itself; set gateway.agent_may_score", status=403, code="may_not_score"
        )
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)
                               or not math.isfinite(reward)):  # fmt: skip
        raise Refusal(f"reward: {reward!r}: expected a finite number", param="reward")
    if not isinstance(extra, dict):
        raise Refusal("extra: expected an object", param="extra")
    opened.finished = Finish(reward=None if reward is None else float(reward), extra=extra)


async def _begin_events(send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send_json(send: Send, status: int, body: Mapping[str, Any]) -> None:
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    if status >= 400:
        headers.append((b"x-should-retry", b"false"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
