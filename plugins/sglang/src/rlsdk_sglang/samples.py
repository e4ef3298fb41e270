"""Running samples, and the calls of `generate` that wait for them."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass

from rlsdk.interfaces import FinishReason, GenerationOutput
from rlsdk.kit.generation.serving import RunningSample


class Call:
    """One call of `generate`: filled by the client's thread, emptied on the caller's event loop."""

    def __init__(self, num_samples: int) -> None:
        self.left = num_samples
        """Number of samples that are still running."""
        self._finished: list[GenerationOutput] = []
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()

    def put(self, output: GenerationOutput) -> None:
        with self._lock:
            self._finished.append(output)
            self.left -= 1
        self._wake_caller()

    def fail(self, error: BaseException) -> None:
        """Fails the call with this error; only the first is kept."""
        with self._lock:
            self._error = self._error or error
        self._wake_caller()

    async def take(self) -> list[GenerationOutput]:
        """Waits for samples that finish and returns those since the last call; empty if no sample is left.

        Raises:
            Exception: the error that ended the call.
        """
        while True:
            with self._lock:
                if self._error is not None:
                    raise self._error
                taken, self._finished = self._finished, []
                if taken or not self.left:
                    return taken
                self._news.clear()
            await self._news.wait()

    def _wake_caller(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.set)


@dataclass(kw_only=True)
class Sample(RunningSample):
    """One sample of one request. No `key` is a prefix of another (SGLang aborts by prefix); `seed` is a signed 64-bit
    number."""

    call: Call

    def finish(self, reason: FinishReason, version: int) -> None:
        """Passes the finished sample to its call. `version` is used for a sample without tokens."""
        self.call.put(self.output(reason, version))
