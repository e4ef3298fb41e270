"""The event loop and thread that SGLang uses in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from rlsdk.kit.ranks.progress import idle_s
from rlsdk.kit.ranks.waiting import result_while

T = TypeVar("T")


class ClientThread:
    """An event loop on its own thread.

    SGLang binds itself to the first loop that uses it, but each call of `generate` may come from another loop. SGLang
    also replaces signal handlers if it is started on the main thread.
    """

    def __init__(self) -> None:
        self.loop = asyncio.SelectorEventLoop()
        # A daemon thread: a hanging request must not keep an exiting process alive.
        self._thread = threading.Thread(target=self._work, name="rlsdk-sglang", daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Runs a function on the thread."""
        return self.begin(function, *args).result()

    def begin(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """As `call`, without waiting. A running function is not cancelled."""

        async def job() -> T:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(job(), self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float, look: Callable[[], None] = lambda: None) -> T:
        """Runs a coroutine on the thread until it is done.

        Args:
            coroutine: to run.
            timeout_s: longest time without a result and without progress of this process (`rlsdk.kit.ranks.progress`).
            look: called every second; its exception ends the wait.

        Raises:
            TimeoutError: it took longer.
        """
        return result_while(asyncio.run_coroutine_threadsafe(coroutine, self.loop), timeout_s, look, idle_s=idle_s)

    def stop(self) -> None:
        """Cancels everything that still runs and ends the thread."""

        async def cancel_all() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel_all(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _work(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
