"""Calls of one object: async ones on the event loop, the others in a thread of its own, one after another."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import Any

_Work = tuple[Callable[[], Any], asyncio.Future[Any], asyncio.AbstractEventLoop]


class Worker:
    """Runs the methods of one object.

    A call that exceeds its time is given up. Nothing can end a thread, so later calls wait for it, and exceed theirs if
    it does not return; other objects are not affected.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def call(self, function: Callable[..., Any], *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """Returns the result of a call.

        Raises:
            TimeoutError: it did not return within `timeout_s`.
            Exception: what it raised.
        """
        async with asyncio.timeout(timeout_s):
            if inspect.iscoroutinefunction(function):
                return await _guarded(function(*args, **kwargs))
            made = await self._in_thread(lambda: function(*args, **kwargs))
            return await _guarded(made) if inspect.isawaitable(made) else made

    def close(self) -> None:
        """Ends the thread once its calls have returned. Safe to call twice."""
        self._queue.put(None)

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        if self._thread is None:
            # A daemon: a tool that never returns must not keep the process.
            self._thread = threading.Thread(target=self._main, name="rlsdk-environment", daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._queue.put((function, future, loop))
        return await future

    def _main(self) -> None:
        while (work := self._queue.get()) is not None:
            function, future, loop = work
            if future.cancelled():  # given up before it began
                continue
            try:
                result, error = function(), None
            except BaseException as raised:  # SystemExit of a tool is its failure, not the process's end
                result, error = None, raised
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:  # the loop is closed: nobody waits
                return


async def _guarded(made: Awaitable[Any]) -> Any:
    """Awaits; an exit that it asks for is its failure, not the process's end."""
    try:
        return await made
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:
        future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
