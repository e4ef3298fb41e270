"""The one thread on which a worker's engines live, with the one event loop that they share."""

from __future__ import annotations

import asyncio
import heapq
import inspect
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


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
        self._loop = asyncio.new_event_loop()
        # Made here: `submit` may be called before the thread runs.
        self._came = asyncio.Event()
        # A daemon: a hung collective must not keep a process alive that was told to exit.
        self.thread = threading.Thread(target=self._main, name="rlsdk-engine", daemon=True)
        self.thread.start()

    def submit(self, sequence: int, job: Callable[[], Any]) -> Future[Any]:
        """Queues a job; it runs when every job of a lower number, from 0 on, has run."""
        future: Future[Any] = Future()
        with self._lock:
            heapq.heappush(self._waiting, (sequence, future, job))
        self._loop.call_soon_threadsafe(self._came.set)
        return future

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._work())

    async def _work(self) -> None:
        for sequence in itertools.count():
            future, job = await self._take(sequence)
            await _run_into(future, job)

    async def _take(self, sequence: int) -> tuple[Future[Any], Callable[[], Any]]:
        while True:
            self._came.clear()
            with self._lock:
                if self._waiting and self._waiting[0][0] == sequence:
                    _, future, job = heapq.heappop(self._waiting)
                    return future, job
            await self._came.wait()


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
