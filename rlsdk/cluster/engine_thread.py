"""The one thread on which a worker's engines live."""

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
    overtake each other on the way.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Future[Any], Callable[[], Any]]] = []
        self._next = 0
        self._wake = threading.Condition()
        # A daemon: a hung collective must not keep a process alive that was told to exit.
        self.thread = threading.Thread(target=self._work, name="rlsdk-engine", daemon=True)
        self.thread.start()

    def submit(self, sequence: int, job: Callable[[], Any]) -> Future[Any]:
        """Queues a job; it runs when every job of a lower number, from 0 on, has run."""
        future: Future[Any] = Future()
        with self._wake:
            heapq.heappush(self._waiting, (sequence, future, job))
            self._wake.notify()
        return future

    def _work(self) -> None:
        runner = asyncio.Runner()
        for sequence in itertools.count():
            future, job = self._take(sequence)
            run_into(future, job, runner)

    def _take(self, sequence: int) -> tuple[Future[Any], Callable[[], Any]]:
        with self._wake:
            while not self._waiting or self._waiting[0][0] != sequence:
                self._wake.wait()
            _, future, job = heapq.heappop(self._waiting)
        return future, job


def run_into(future: Future[Any], job: Callable[[], Any], runner: asyncio.Runner | None = None) -> None:
    """Runs a job, a coroutine to its end, and stores its result or its exception, `SystemExit` included.

    With a runner all coroutines share one event loop, as engines that keep tasks between calls need.
    """
    try:
        result = job()
        if inspect.iscoroutine(result):
            result = asyncio.run(result) if runner is None else runner.run(result)
        future.set_result(result)
    except BaseException as error:
        future.set_exception(error)
