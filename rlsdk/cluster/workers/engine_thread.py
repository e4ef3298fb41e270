"""The one thread on which a worker's engines live, with the one event loop that they share."""

from __future__ import annotations

import asyncio
import heapq
import inspect
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

T = TypeVar("T")
_LOOK_S = 0.5
"""Seconds between checks of whether a loop was closed."""


class EngineThread:
    """Runs jobs one at a time, all on the same thread, in the order of their sequence numbers.

    Torch keeps OpenMP teams, the current CUDA device and autograd state per thread, so an engine must be built and used
    on one. The order is the controller's: all ranks run the same collectives in the same order, even if messages
    overtake each other on the way. Tasks that a host leaves on the loop (its pump) go on between jobs, and while a job
    awaits.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Future[Any], Callable[[], Any]]] = []
        self._lock = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        # Made here: `submit` may be called before the thread runs.
        self._came = asyncio.Event()
        # A daemon: a hung collective must not keep a process alive that was told to exit.
        self.thread = threading.Thread(target=self._main, name="rlsdk-engine", daemon=True)
        self.thread.start()

    def submit(self, sequence: int, job: Callable[[], Any]) -> Future[Any]:
        """Queues a job; it runs when every job of a lower number, from 0 on, has run.

        Raises:
            RuntimeError: the thread is closed.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("this engine thread is closed")
            heapq.heappush(self._waiting, (sequence, future, job))
            self._loop.call_soon_threadsafe(self._came.set)
        return future

    def close(self, timeout_s: float) -> None:
        """Ends the thread after the job that runs now, and closes its event loop. Jobs that still wait are cancelled,
        and so are tasks that hosts left on the loop. Safe to call twice.

        Args:
            timeout_s: how long to wait for the job that runs now; it keeps its thread if it takes longer.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._came.set)
        self.thread.join(timeout_s)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._work())
            self._loop.run_until_complete(_cancel_others())
        finally:
            self._loop.close()

    async def _work(self) -> None:
        for sequence in itertools.count():
            taken = await self._take(sequence)
            if taken is None:
                break
            await _run_into(*taken)
        for _, future, _ in self._waiting:
            future.cancel()

    async def _take(self, sequence: int) -> tuple[Future[Any], Callable[[], Any]] | None:
        """The job of this number, once it is there; None once the thread is closed."""
        while True:
            self._came.clear()
            with self._lock:
                if self._closed:
                    return None
                if self._waiting and self._waiting[0][0] == sequence:
                    _, future, job = heapq.heappop(self._waiting)
                    return future, job
            await self._came.wait()


async def _cancel_others() -> None:
    """Cancels every other task of the running loop, and waits for it."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _run_into(future: Future[Any], job: Callable[[], Any]) -> None:
    """Runs a job, a coroutine to its end, and stores its result or its exception, `SystemExit` included."""
    try:
        result = job()
        if inspect.iscoroutine(result):
            result = await result
        future.set_result(result)
    except BaseException as error:
        future.set_exception(error)


def run_into(future: Future[Any], job: Callable[[], Any]) -> None:
    """As a job of the engine thread, on the calling thread: for methods that are served beside it."""
    try:
        result = job()
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        future.set_result(result)
    except BaseException as error:
        future.set_exception(error)


def call_on(loop: asyncio.AbstractEventLoop, job: Callable[[], T]) -> T:
    """Runs a job on the thread of a running loop, between two of its turns, and waits for it.

    Raises:
        RuntimeError: the loop was closed before it ran.
        BaseException: what the job raised.
    """
    future: Future[T] = Future()
    loop.call_soon_threadsafe(run_into, future, job)
    while True:
        try:
            return future.result(_LOOK_S)
        except FutureTimeoutError:
            if future.done():
                raise
            if loop.is_closed():
                raise RuntimeError("the engine's thread was closed before it ran this") from None
