"""Guards a RolloutEngine: refuses calls that its state does not allow (asleep, without weights, closed)."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from rlsdk.interfaces import (
    ConfigError,
    Delivery,
    GenerationOutput,
    GenerationRequest,
    RankContext,
    RlsdkError,
    RolloutEngine,
    RolloutSpec,
    SyncReceipt,
    WeightLayout,
    WeightShard,
    WeightSyncError,
)
from rlsdk.kit.memory.memory_parts import ROLLOUT_PARTS, check_parts

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


Update = Callable[[Iterable[WeightShard], int], SyncReceipt]


@dataclass(eq=False)
class _Call:
    """One running call of `generate`."""

    error: WeightSyncError | None = None
    """Error because of which its samples may no longer be returned."""


class GuardedRolloutEngine(RolloutEngine):
    """Refuses calls that are invalid in the engine's state, and forwards all others; see `RolloutEngine` for what an
    engine can rely on."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        """The wrapped engine."""
        self.lacking = "it was not initialized"
        """Reason why there are no weights to serve; empty if there are."""
        self.asleep: set[str] = set()
        self.is_closed = False
        self._level = 0
        """Level of sleep; 0: awake."""
        self._has_adapter = False
        self._has_weights = False
        """Whether the weights are there, below the adapter if there is one."""
        self._paused = False
        self._calls: set[_Call] = set()
        self._lock = threading.Lock()
        """Held while `_calls` changes, as `close` may be called from another thread."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        self.engine.initialize(ctx, spec)
        self._has_adapter = spec.model.adapter is not None
        if spec.load_weights:
            self._complete()
        else:
            self.lacking = "no weights have arrived yet: call update_weights() first"

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        """See `RolloutEngine`.

        Raises:
            WeightSyncError: there are no weights to serve, or an update failed while samples ran.
            RlsdkError: the engine is asleep or closed.
        """
        self._check_served()
        call = _Call()
        with self._lock:
            self._calls.add(call)
        try:
            stream = cast("AsyncGenerator[GenerationOutput, None]", self.engine.generate(requests))
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    if call.error is not None:
                        raise call.error
                    yield output
        finally:
            with self._lock:
                self._calls.discard(call)

    def layout(self) -> Sequence[WeightLayout]:
        return self.engine.layout()

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        """See `RolloutEngine`. If it fails after the first item was read, nothing is served until an update
        succeeds.

        Raises:
            RlsdkError: the weights are asleep, or the engine is closed.
        """
        self._check_open("update_weights")
        self._check_awake("update_weights", "weights")
        receipt = self._updated(self.engine.update_weights, shards, version)
        self._complete()
        return receipt

    def receive_weights(self, deliveries: Sequence[Delivery], version: int) -> SyncReceipt:
        """See `RolloutEngine`. If it fails, nothing is served until an update succeeds.

        Raises:
            RlsdkError: the weights are asleep, or the engine is closed.
        """
        self._check_open("receive_weights")
        self._check_awake("receive_weights", "weights")
        try:
            receipt = self.engine.receive_weights(deliveries, version)
        except BaseException:
            self._has_weights = False
            self._lose_weights(version)
            raise
        self._complete()
        return receipt

    def adapter_layout(self) -> Sequence[WeightLayout]:
        return self.engine.adapter_layout()

    def update_adapter(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        """See `RolloutEngine`. If it fails after the first item was read, nothing is served until an update
        succeeds.

        Raises:
            RlsdkError: the weights are asleep, or the engine is closed.
            WeightSyncError: there are no weights below it.
        """
        self._check_open("update_adapter")
        self._check_awake("update_adapter", "weights")
        if not self._has_weights:
            raise WeightSyncError(f"an adapter has no weights to stand beside: {self.lacking}")
        receipt = self._updated(self.engine.update_adapter, shards, version, is_whole=False)
        self.lacking = ""
        return receipt

    def num_decoded(self) -> int | None:
        return None if self.is_closed else self.engine.num_decoded()

    def kv_used(self) -> float | None:
        return None if self.is_closed else self.engine.kv_used()

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        if not self.is_closed:
            self.engine.abort(request_ids)

    def pause(self) -> None:
        if not self.is_closed:
            self.engine.pause()
            self._paused = True

    def resume(self, *, keep_cache: bool = False) -> None:
        """See `RolloutEngine`. Refused without weights; paused samples stay paused until a complete update, or
        `abort`."""
        if not self.is_closed:
            self._check_served()
            self._paused = False
            if keep_cache:
                self.engine.resume(keep_cache=True)
            else:
                self.engine.resume()

    def sleep(self, level: int = 1) -> None:
        """See `RolloutEngine`. No-op if everything is already asleep at this level or deeper.

        Raises:
            ConfigError: another level than 1 or 2.
            RlsdkError: a call of `generate` is running, or the engine is closed.
        """
        self._check_open("sleep")
        if level not in (1, 2):
            raise ConfigError(f"sleep: level {level!r}; expected 1 (weights stay on the host) or 2 (they are dropped)")
        if self._calls:
            raise RlsdkError(
                f"sleep() was called while {len(self._calls)} calls of generate() are running; finish or abort them "
                "first"
            )
        if len(self.asleep) == len(ROLLOUT_PARTS) and level <= self._level:
            return
        self.engine.sleep(level)
        self.asleep, self._level = set(ROLLOUT_PARTS), max(level, self._level)
        if level > 1:
            self._has_weights = False
            self.lacking = "sleep dropped the weights: call wake(), then update_weights()"

    def wake(self, parts: Sequence[str] = ROLLOUT_PARTS) -> None:
        """See `RolloutEngine`. Parts that are already awake are skipped.

        Raises:
            ConfigError: an unknown part.
            RlsdkError: the engine is closed.
        """
        self._check_open("wake")
        check_parts("wake", parts, ROLLOUT_PARTS)
        waking = [part for part in ROLLOUT_PARTS if part in parts and part in self.asleep]
        if waking:
            self.engine.wake(waking)
            self.asleep -= set(waking)
        if not self.asleep:
            self._level = 0

    def close(self) -> None:
        self.is_closed = True
        self.engine.close()

    def _updated(
        self, update: Update, shards: Iterable[WeightShard], version: int, *, is_whole: bool = True
    ) -> SyncReceipt:
        """The receipt of an update; if it fails once begun, what it replaces is lost: the weights, or the adapter."""
        has_begun = False

        def watched() -> Iterator[WeightShard]:
            nonlocal has_begun
            has_begun = True
            yield from shards

        try:
            return update(watched(), version)
        except BaseException:
            if has_begun:
                self._has_weights &= not is_whole
                self._lose_weights(version)
            raise

    def _complete(self) -> None:
        """Notes that the weights have come; with an adapter, they wait for it."""
        self._has_weights = True
        self.lacking = "the adapter has not arrived yet: call update_adapter()" if self._has_adapter else ""

    def _lose_weights(self, version: int) -> None:
        self.lacking = f"the update to version {version} failed halfway; a complete update is needed"
        # Paused samples have sampled nothing since then; others may have sampled from partly updated weights.
        if not self._paused:
            with self._lock:
                for call in self._calls:
                    call.error = WeightSyncError(f"samples ran while {self.lacking}")

    def _check_served(self) -> None:
        self._check_open("generate")
        self._check_awake("generate", *ROLLOUT_PARTS)
        if self.lacking:
            raise WeightSyncError(f"nothing can be generated: {self.lacking}")

    def _check_awake(self, method: str, *parts: str) -> None:
        if self.asleep & set(parts):
            raise RlsdkError(
                f"{method}() was called while the engine is asleep: call wake({sorted(self.asleep)}) first"
            )

    def _check_open(self, method: str) -> None:
        if self.is_closed:
            raise RlsdkError(f"{method}() was called after the engine was closed")
