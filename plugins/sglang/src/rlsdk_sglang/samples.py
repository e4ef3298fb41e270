"""Samples that run, and the calls of `generate` that wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rlsdk.interfaces import FinishReason, GenerationOutput, GenerationRequest


class Call:
    """One call of `generate`: filled by the client's thread, emptied on the caller's event loop."""

    def __init__(self, num_samples: int) -> None:
        self.left = num_samples
        """Samples that still run."""
        self._finished: list[GenerationOutput] = []
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()

    def put(self, output: GenerationOutput) -> None:
        with self._lock:
            self._finished.append(output)
            self.left -= 1
        self._tell()

    def fail(self, error: BaseException) -> None:
        """Ends the call with this error; the first counts."""
        with self._lock:
            self._error = self._error or error
        self._tell()

    async def take(self) -> list[GenerationOutput]:
        """What finished since the last look; waits for something. Empty once nothing is left.

        Raises:
            what ended the call.
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

    def _tell(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.set)


@dataclass
class Sample:
    """One sample of one request."""

    key: str
    """The engine's name for it. None is the beginning of another: SGLang aborts by beginnings."""
    call: Call
    request: GenerationRequest
    index: int
    seed: int
    """64 bits, signed."""
    limit: int
    """Most response tokens."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    first_version: int | None = None
    last_version: int | None = None

    def extend(self, token_ids: Sequence[int], log_probs: Sequence[float], version: int) -> None:
        """Adds tokens that were sampled under `version`, as far as is known by now."""
        if not token_ids:
            return
        self.token_ids.extend(token_ids)
        self.log_probs.extend(log_probs)
        self.first_version = version if self.first_version is None else self.first_version
        self.last_version = version

    def finish(self, reason: FinishReason, version: int) -> None:
        """Gives it to its call. `version` counts for a sample without any token."""
        self.call.put(
            GenerationOutput(
                request_id=self.request.request_id,
                sample_index=self.index,
                token_ids=np.array(self.token_ids, np.int64),
                log_probs=np.array(self.log_probs, np.float32),
                finish_reason=reason,
                policy_version=version if self.first_version is None else self.first_version,
                last_policy_version=version if self.last_version is None else self.last_version,
            )
        )
