"""The serving side of the stream: accepts requests one by one, returns samples as they finish.

Runs next to one rollout engine, on the event loop of the engine's thread. Blocking calls of the engine (an update, a
pause) run on that loop too, between two decoding steps.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rlsdk.interfaces import GenerationOutput, GenerationRequest, RlsdkError, RolloutEngine, WorkerError
from rlsdk.rollouts.client.packed import PackedOutputs


@dataclass(frozen=True, kw_only=True)
class Lost:
    """Requests that the engine failed, with the reason."""

    request_ids: tuple[str, ...]
    error: RlsdkError
    """The engine's exception; errors other than rlsdk's own become a WorkerError, so that they can cross processes."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """Finished samples of a replica since the last call."""

    outputs: PackedOutputs
    lost: tuple[Lost, ...] = ()
    num_decoded: int | None = None
    """Number of tokens that the engine has sampled in total; None: it does not report this."""
    kv_used: float | None = None
    """Share of its KV cache that running samples use; None: it does not report this."""


class Pump:
    """Feeds one engine. `submit` and `collect` may be called from any thread; create it on the engine's loop."""

    def __init__(self, engine: RolloutEngine, *, shares: bool) -> None:
        """Starts nothing.

        Args:
            engine: an engine that is ready to generate, or will be soon.
            shares: several calls of `generate` may run at once (`Capability.ABORT`). Otherwise requests wait for the
                previous call.
        """
        self._engine = engine
        self._shares = shares
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._finished: list[GenerationOutput] = []
        self._lost: list[Lost] = []
        self._waiting: deque[tuple[GenerationRequest, ...]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._announced = False

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Passes requests to the engine; returns immediately."""
        self._loop.call_soon_threadsafe(self._begin, tuple(requests))

    def collect(self, wait_s: float) -> Collected:
        """Samples that finished since the last call; waits at most `wait_s` seconds for the first."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._lost, timeout=wait_s)
            # The loop's thread appends meanwhile: only the items that were read are removed.
            finished = self._finished[:]
            del self._finished[: len(finished)]
            lost = self._lost[:]
            del self._lost[: len(lost)]
        return Collected(
            outputs=PackedOutputs.pack(finished),
            lost=tuple(lost),
            num_decoded=self._engine.num_decoded(),
            kv_used=self._engine.kv_used(),
        )

    def _begin(self, requests: tuple[GenerationRequest, ...]) -> None:
        self._waiting.append(requests)
        if self._shares or not self._tasks:
            self._start_waiting()

    def _start_waiting(self) -> None:
        """Runs one call for all waiting requests."""
        if self._waiting:
            requests = [request for part in self._waiting for request in part]
            self._waiting.clear()
            task = self._loop.create_task(self._serve(requests))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._start_waiting()

    async def _serve(self, requests: Sequence[GenerationRequest]) -> None:
        left = {request.request_id: request.n for request in requests}
        try:
            async for output in self._engine.generate(requests):
                left[output.request_id] -= 1
                self._finished.append(output)
                self._announce()
        except Exception as error:
            names = tuple(name for name, count in left.items() if count)
            self._lost.append(Lost(request_ids=names, error=_portable(error)))
            self._announce()

    def _announce(self) -> None:
        """Wakes the waiting `collect`, once for all samples of a decoding step."""
        if not self._announced:
            self._announced = True
            self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._announced = False
        with self._changed:
            self._changed.notify()


def _portable(error: Exception) -> RlsdkError:
    if isinstance(error, RlsdkError):
        return error
    return WorkerError(f"the rollout engine raised:\n{''.join(traceback.format_exception(error))}")
