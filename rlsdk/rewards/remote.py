"""A reward that a service computes: samples go out in batches over HTTP, and what goes wrong costs its samples."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic import ValidationError

from rlsdk.interfaces import ConfigError, DataError, RewardSample
from rlsdk.rewards.booking import Booking
from rlsdk.rewards.definitions import FailureKind, RewardDef, RewardLimits
from rlsdk.rewards.results import RewardResult
from rlsdk.rewards.routing import applies_to
from rlsdk.rewards.service import ScoreReply, ScoreRequest, SentSample, describe

_SHOWN = 200
"""Characters of an answer that an error shows."""


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """How a service is asked."""

    batch_size: int = 64
    """Most samples in one request."""
    batch_wait_s: float = 0.02
    """Seconds that a sample waits for others to go with."""
    max_concurrent: int = 4
    """Requests under way at once."""
    timeout_s: float = 60.0
    """Seconds for one attempt, from the connection to the last byte."""
    retries: int = 3
    """Further attempts after a connection error or a status of 500 and above; nothing else is tried again."""
    retry_wait_s: float = 0.5
    """Seconds before the first of them; each next one waits twice as long."""
    max_response_bytes: int = 8 << 20
    send_tokens: bool = False
    """Sends `response_ids`."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with every request: secrets belong here, and are shown nowhere."""


class RemoteError(Exception):
    """A request that came to nothing; the message says why, and names the URL."""

    def __init__(self, message: str, *, kind: FailureKind = FailureKind.SERVICE, again: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.again = again
        """Another attempt may help."""


class ScoreClient:
    """Asks one URL. Not for several event loops."""

    def __init__(self, url: str, options: RemoteOptions) -> None:
        """
        Raises:
            ConfigError: the URL is not one that is asked.
        """
        self.url = check_url(url)
        self._options = options
        self._http = httpx.AsyncClient(
            headers={**options.headers, "Accept": "application/json", "Accept-Encoding": "identity"},
            timeout=None,
            follow_redirects=False,
            trust_env=False,  # no proxies, and no passwords from a .netrc
            limits=httpx.Limits(max_connections=options.max_concurrent),
        )

    async def score(self, samples: Sequence[SentSample]) -> ScoreReply:
        """One result for each sample.

        Raises:
            RemoteError: what the service answered is no such thing, or it did not answer.
        """
        body = ScoreRequest.model_construct(samples=list(samples)).model_dump_json().encode()
        data = await self._with_retries(body)
        try:
            reply = ScoreReply.model_validate_json(data)
        except ValidationError as error:
            raise RemoteError(f"{self.url} answered no scores: {describe(error)}: {_shown(data)}") from error
        if len(reply.results) != len(samples):
            raise RemoteError(f"{self.url} answered {len(reply.results)} results; expected {len(samples)}")
        return reply

    async def close(self) -> None:
        await self._http.aclose()

    async def _with_retries(self, body: bytes) -> bytes:
        for attempt in range(self._options.retries + 1):
            try:
                async with asyncio.timeout(self._options.timeout_s):
                    return await self._post(body)
            except TimeoutError:
                limit = f"{self._options.timeout_s:g} s"
                raise RemoteError(f"{self.url} did not answer within {limit}", kind=FailureKind.TIMEOUT) from None
            except RemoteError as error:
                if not error.again or attempt == self._options.retries:
                    tries = f" ({attempt + 1} attempts)" if attempt else ""
                    raise RemoteError(f"{error}{tries}", kind=error.kind) from error
            await asyncio.sleep(self._options.retry_wait_s * 2**attempt * random.uniform(0.8, 1.2))
        raise AssertionError("unreachable")

    async def _post(self, body: bytes) -> bytes:
        try:
            async with self._http.stream(
                "POST", self.url, content=body, headers={"Content-Type": "application/json"}
            ) as response:
                return await self._read(response)
        except httpx.TransportError as error:
            why = str(error) or type(error).__name__
            raise RemoteError(f"{self.url} cannot be reached: {why}", again=True) from error
        except httpx.HTTPError as error:
            raise RemoteError(f"{self.url}: {type(error).__name__}: {error}") from error

    async def _read(self, response: httpx.Response) -> bytes:
        """The body, within its limit: of an error only the beginning."""
        status = response.status_code
        if response.is_redirect:
            target = response.headers.get("Location", "nowhere")
            raise RemoteError(f"{self.url} redirects to {target!r}, which is not followed; name the right URL")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise RemoteError(f"{self.url} answered compressed, although that was not asked for")
        data = bytearray()
        limit = self._options.max_response_bytes if status == httpx.codes.OK else _SHOWN
        async for part in response.aiter_raw():
            data += part
            if len(data) > limit:
                break
        if status != httpx.codes.OK:
            raise RemoteError(f"{self.url} answered {status}: {_shown(bytes(data))}", again=status >= 500)
        if len(data) > limit:
            raise RemoteError(f"{self.url} answered more than max_response_bytes {limit}")
        return bytes(data)


class RemoteScorer:
    """One reward of a service. Its requests run on an event loop in a thread of its own."""

    def __init__(self, reward: RewardDef, options: RemoteOptions, limits: RewardLimits) -> None:
        """Starts the thread.

        Args:
            reward: its `target` is the URL.
            options: how the service is asked.
            limits: on what it may give, as for every reward.

        Raises:
            ConfigError: the URL is not one that is asked.
        """
        check_url(reward.target)
        self._reward, self._options, self._limits = reward, options, limits
        self._waiting: deque[tuple[_Asked, int]] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._asked: set[_Asked] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rlsdk-remote-reward", daemon=True)
        self._thread.start()
        self._client = self._call(self._open())

    def check(self) -> None:
        """Asks for the scores of no samples: the service is there, and speaks the protocol.

        Raises:
            ConfigError: it is not, or does not.
        """
        try:
            self._call(self._client.score([]))
        except RemoteError as error:
            raise ConfigError(
                f"reward {self._reward.name!r}: {error}. Start the service, for instance by `rlsdk reward serve`, or "
                "set remote.check_at_start: false"
            ) from error

    def wait_ready(self) -> None:
        """As `Scorer.wait_ready`: there is nothing to load. `check` asks whether the service is there."""

    def submit(self, samples: Sequence[RewardSample]) -> Future[RewardResult]:
        """As `Scorer.submit`.

        Raises:
            DataError: a row, or what a rollouter handed over, holds more than JSON types.
        """
        asked = _Asked(Booking([self._reward], samples, self._limits))
        rows = self._reward.rows
        items = [at for at, sample in enumerate(samples) if not rows or applies_to(rows, sample.row)]
        for at in items:
            _check_json(samples[at])
        self._loop.call_soon_threadsafe(self._enqueue, asked, items)
        return asked.future

    def close(self) -> None:
        """As `Scorer.close`."""
        if not self._thread.is_alive():
            return
        with suppress(RuntimeError):
            self._call(self._shut())
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self) -> ScoreClient:
        return ScoreClient(self._reward.target, self._options)

    async def _shut(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for asked in self._asked:
            asked.future.cancel()
        await self._client.close()

    def _enqueue(self, asked: _Asked, items: Sequence[int]) -> None:
        self._asked.add(asked)
        self._waiting.extend((asked, at) for at in items)
        self._settle(asked)
        self._send()

    def _send(self, *, all_of_it: bool = False) -> None:
        """Starts as many requests as may run: full ones at once, others when their time to wait is over."""
        while self._waiting and len(self._running) < self._options.max_concurrent:
            if len(self._waiting) < self._options.batch_size and not all_of_it:
                if self._timer is None:
                    self._timer = self._loop.call_later(self._options.batch_wait_s, self._time_is_up)
                return
            count = min(self._options.batch_size, len(self._waiting))
            batch = [self._waiting.popleft() for _ in range(count)]
            task = self._loop.create_task(self._ask([one for one in batch if not one[0].future.cancelled()]))
            self._running.add(task)
            task.add_done_callback(self._after)

    def _time_is_up(self) -> None:
        self._timer = None
        self._send(all_of_it=True)

    def _after(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._send()

    async def _ask(self, batch: Sequence[tuple[_Asked, int]]) -> None:
        sent = [SentSample.of(asked.booking.samples[at], with_tokens=self._options.send_tokens) for asked, at in batch]
        try:
            reply = await self._client.score(sent)
        except RemoteError as error:
            for asked, at in batch:
                asked.booking.fail((0, at), error.kind, str(error))
        else:
            for (asked, at), given in zip(batch, reply.results, strict=True):
                if given.error is not None:
                    message = f"{self._client.url}: {given.error[:_SHOWN]}"
                    asked.booking.fail((0, at), FailureKind.SERVICE, message)
                else:
                    asked.booking.take((0, at), given.score, given.token_scores, given.metrics)
        for asked in {asked for asked, _ in batch}:
            self._settle(asked)

    def _settle(self, asked: _Asked) -> None:
        """Hands the result out once nothing is left."""
        if asked.booking.left and not asked.future.cancelled():
            return
        self._asked.discard(asked)
        with suppress(InvalidStateError):  # cancelled meanwhile
            asked.future.set_result(asked.booking.result())


@dataclass(eq=False)
class _Asked:
    """One `submit` call."""

    booking: Booking
    future: Future[RewardResult] = field(default_factory=Future)


def is_url(name: str) -> bool:
    """Whether a reward is named by a URL."""
    return name.startswith(("http://", "https://"))


def check_url(url: str) -> str:
    """The URL.

    Raises:
        ConfigError: it is none of HTTP, has no host, or holds a password.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"reward {url!r}: {error}; expected a URL such as http://127.0.0.1:8700/score") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"reward {url!r}: expected a URL such as http://127.0.0.1:8700/score")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            f"reward http(s)://...@{parts.hostname}: a URL with a password would be written into the run's folder; "
            "name an environment variable in remote.token_env"
        )
    return url


def _check_json(sample: RewardSample) -> None:
    try:
        json.dumps([sample.row, sample.extra])
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"a sample cannot be sent to a reward service: {error}; expected JSON types") from error


def _shown(data: bytes) -> str:
    text = data[:_SHOWN].decode("utf-8", "replace")
    return repr(text) + ("..." if len(data) > _SHOWN else "")
