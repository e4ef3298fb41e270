"""A reward of a service. Samples are sent in batches over HTTP; an error fails only the samples that cause it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlsdk.interfaces import ConfigError, DataError, RewardSample
from rlsdk.interfaces.settings import RewardLimits
from rlsdk.rewards.scores.definitions import FailureKind, RewardDef
from rlsdk.rewards.scores.results import ResultBuilder, RewardResult
from rlsdk.rewards.scores.routing import applies_to
from rlsdk.rewards.services.http_client import HttpClient, RemoteError, RemoteOptions, check_url
from rlsdk.rewards.services.messages import SentScore, encode_request, encode_sample, read_reply
from rlsdk.system.printable import described

_SPLIT_TIMEOUTS = 4
"""A failed request is split for at most this many times `timeout_s`: a service may take long to fail, each time."""
_SHOWN = 200
"""Maximum number of characters of a service's error that a failure shows."""


class Client(Protocol):
    """Client of one service, used on one event loop."""

    @property
    def name(self) -> str:
        """Name of the service for messages: its URL."""
        ...

    async def score(self, samples: Sequence[RewardSample]) -> Sequence[SentScore | RemoteError]:
        """Returns one result for each sample, or the error of a request for this sample.

        Raises:
            RemoteError: the service did not answer, or its answer is invalid: all samples fail.
        """
        ...

    async def check(self) -> None:
        """Checks that the service is reachable and answers correctly.

        Raises:
            RemoteError: it is not reachable, or its answer is invalid.
        """
        ...

    async def close(self) -> None: ...


class ScoreClient:
    """Client of a service with the protocol of `rlsdk.rewards.services.messages`."""

    def __init__(self, url: str, options: RemoteOptions) -> None:
        """
        Raises:
            ConfigError: the URL cannot be used (`check_url`).
        """
        self.name = check_url(url)
        self._options = options
        self._http = HttpClient(options)

    async def score(self, samples: Sequence[RewardSample]) -> Sequence[SentScore | RemoteError]:
        """See `Client.score`."""
        sent: list[bytes] = []
        faults: dict[int, SentScore] = {}
        for at, sample in enumerate(samples):
            try:
                sent.append(encode_sample(sample, with_tokens=self._options.send_tokens))
            except ValueError as error:
                faults[at] = SentScore(error=f"the sample cannot be sent: {error}")
        results = iter(await self._ask_or_split(sent) if sent or not samples else [])
        return [faults[at] if at in faults else next(results) for at in range(len(samples))]

    async def _ask_or_split(self, sent: Sequence[bytes]) -> Sequence[SentScore | RemoteError]:
        """Asks in one request. If it fails, perhaps because of a single sample, asks about its halves, and so on.

        Raises:
            RemoteError: the request failed, and not because of some of its samples.
        """
        try:
            return await self._ask(sent)
        except RemoteError as error:
            if len(sent) == 1 or not error.of_sample:
                raise
            whole = error
        until = time.monotonic() + _SPLIT_TIMEOUTS * self._options.timeout_s
        results = await self._ask_halves(sent, whole, until)
        if all(isinstance(result, RemoteError) for result in results):
            raise whole
        return results

    async def _ask_halves(
        self, sent: Sequence[bytes], error: RemoteError, until: float
    ) -> Sequence[SentScore | RemoteError]:
        """Results of the samples of a failed request; each part is asked about once, while there is time."""
        if len(sent) == 1 or not error.of_sample:
            return [error] * len(sent)
        results: list[SentScore | RemoteError] = []
        middle = len(sent) // 2
        for part in (sent[:middle], sent[middle:]):
            if time.monotonic() > until:
                results += [error] * len(part)
                continue
            try:
                results += await self._ask(part, retries=0)
            except RemoteError as inner:
                results += await self._ask_halves(part, inner, until)
        return results

    async def _ask(self, sent: Sequence[bytes], *, retries: int | None = None) -> list[SentScore]:
        data = await self._http.post(self.name, encode_request(sent), retries=retries)
        try:
            return read_reply(data, len(sent))
        except ValueError as error:
            raise RemoteError(f"{self.name} {error}") from error

    async def check(self) -> None:
        """Sends an empty request."""
        await self.score([])

    async def close(self) -> None:
        await self._http.close()


class RemoteScorer:
    """A scorer with one reward that a service computes. Requests run on an event loop in its own thread."""

    def __init__(
        self,
        reward: RewardDef,
        options: RemoteOptions,
        limits: RewardLimits,
        make_client: Callable[[str, RemoteOptions], Client] = ScoreClient,
    ) -> None:
        """Starts the thread.

        Args:
            reward: its `target` is the URL.
            options: settings of requests.
            limits: limits on returned values, as for every reward.
            make_client: creates the client from URL and options; called on the thread.

        Raises:
            ConfigError: the URL cannot be used (`check_url`).
        """
        self._reward, self._options, self._limits = reward, options, limits
        self._waiting: deque[tuple[_Pending, int]] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._pending: set[_Pending] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rlsdk-remote-reward", daemon=True)
        self._thread.start()
        try:
            self._client = self._call(self._open(make_client))
        except BaseException:
            self._end_thread()
            raise

    def check(self) -> None:
        """Checks that the service is reachable and answers correctly.

        Raises:
            ConfigError: it is not reachable, or its answer is invalid.
        """
        try:
            self._call(self._client.check())
        except RemoteError as error:
            raise ConfigError(
                f"reward {self._reward.name!r}: {error}. Start the service (`rlsdk reward serve` starts one), "
                "or set remote.check_at_start: false"
            ) from error

    def wait_ready(self) -> None:
        """Returns immediately, because there is nothing to load. `check` checks the service."""

    def submit(self, samples: Sequence[RewardSample]) -> Future[RewardResult]:
        """See `Scorer.submit`.

        Raises:
            DataError: a row, or a sample's `extra`, contains types other than those of JSON.
        """
        pending = _Pending(ResultBuilder([self._reward], samples, self._limits))
        rows = self._reward.rows
        items = [at for at, sample in enumerate(samples) if not rows or applies_to(rows, sample.row)]
        for at in items:
            _check_json(samples[at])
        self._loop.call_soon_threadsafe(self._enqueue, pending, items)
        return pending.future

    def close(self) -> None:
        """See `Scorer.close`."""
        if not self._thread.is_alive():
            return
        with suppress(RuntimeError):
            self._call(self._shut())
        self._end_thread()

    def _end_thread(self) -> None:
        with suppress(RuntimeError):  # already closed
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

    async def _open(self, make_client: Callable[[str, RemoteOptions], Client]) -> Client:
        return make_client(self._reward.target, self._options)

    async def _shut(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for pending in self._pending:
            pending.future.cancel()
        await self._client.close()

    def _enqueue(self, pending: _Pending, items: Sequence[int]) -> None:
        self._pending.add(pending)
        self._waiting.extend((pending, at) for at in items)
        self._finish_if_done(pending)
        self._send()

    def _send(self, *, all_of_it: bool = False) -> None:
        """Starts as many requests as allowed: full ones immediately, others after `batch_wait_s`."""
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

    async def _ask(self, batch: Sequence[tuple[_Pending, int]]) -> None:
        try:
            results = await self._client.score([pending.builder.samples[at] for pending, at in batch])
        except RemoteError as error:
            for pending, at in batch:
                pending.builder.fail((0, at), error.kind, str(error))
        except Exception as error:  # else callers would wait forever
            message = f"{self._client.name}: {described(error)}"
            for pending, at in batch:
                pending.builder.fail((0, at), FailureKind.SERVICE, message)
        else:
            for (pending, at), answer in zip(batch, results, strict=True):
                if isinstance(answer, RemoteError):
                    pending.builder.fail((0, at), answer.kind, str(answer))
                elif answer.error is not None:
                    message = f"{self._client.name}: {answer.error[:_SHOWN]}"
                    pending.builder.fail((0, at), FailureKind.SERVICE, message)
                else:
                    pending.builder.take((0, at), answer.score, answer.token_scores, answer.metrics)
        for pending in {pending for pending, _ in batch}:
            self._finish_if_done(pending)

    def _finish_if_done(self, pending: _Pending) -> None:
        """Sets the result when all samples are done."""
        if pending.builder.left and not pending.future.cancelled():
            return
        self._pending.discard(pending)
        with suppress(InvalidStateError):  # cancelled meanwhile
            pending.future.set_result(pending.builder.result())


@dataclass(eq=False)
class _Pending:
    """One `submit` call."""

    builder: ResultBuilder
    future: Future[RewardResult] = field(default_factory=Future)


def _check_json(sample: RewardSample) -> None:
    """Raises `DataError` for other types than those of JSON. Other faults cost their sample (`encode_sample`)."""
    try:
        json.dumps([sample.row, sample.extra])
    except TypeError as error:
        raise DataError(f"a sample cannot be sent to a reward service: {error}; expected JSON types") from error
    except (ValueError, RecursionError):
        return
