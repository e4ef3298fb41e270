"""Records all calls of a rollout engine and its answers, to compare them with the plain model after each
requirement."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from rlsdk.interfaces import (
    Box,
    Delivery,
    GenerationOutput,
    GenerationRequest,
    RolloutEngine,
    SyncReceipt,
    WeightShard,
    fingerprint,
)
from rlsdk.kit.guards.guarded_rollout import GuardedRolloutEngine
from rlsdk.testing.process.plain_data import not_plain

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


MOST_STATES = 4
"""Number of an engine's weights that are kept."""


@dataclass(eq=False)
class Weights:
    """The weights that an engine served between two updates."""

    version: int
    state: Mapping[str, Tensor] | None
    """None: unknown, or not finite."""
    fingerprints: dict[str, int] = field(default_factory=dict)
    """Fingerprints of the state, once they were requested."""

    def identity(self) -> int:
        """The same for equal weights, whatever their version."""
        if not self.fingerprints and self.state is not None:
            self.fingerprints |= {n: fingerprint(t, Box.whole(tuple(t.shape))) for n, t in self.state.items()}
        return hash(tuple(sorted(self.fingerprints.items())))


@dataclass(frozen=True)
class Given:
    """One output, and a copy of its arrays from when it was yielded."""

    output: GenerationOutput
    token_ids: np.ndarray
    log_probs: np.ndarray

    @property
    def is_changed(self) -> bool:
        same = np.array_equal(self.output.token_ids, self.token_ids)
        return not (same and np.array_equal(self.output.log_probs, self.log_probs, equal_nan=True))


@dataclass(eq=False)
class Call:
    """One call of `generate`."""

    requests: Sequence[GenerationRequest]
    served: list[Weights]
    """The weights that were served during the call, in order."""
    given: list[Given] = field(default_factory=list)
    has_ended: bool = False
    """It ended by itself: it was neither abandoned nor stopped by an error."""
    aborted: set[str] = field(default_factory=set)
    """Ids of the requests that `abort` ended."""
    is_stale: bool = False
    """It continued with the KV cache of older weights."""


class Record:
    """An engine's calls and its answers. It has no reference to the engine."""

    def __init__(self, base: Mapping[str, Tensor] | None) -> None:
        self.base = base
        self.num_given = 0
        """Number of tokens of all outputs."""
        self.served = Weights(0, base)
        self.faults: list[str] = []
        """Faults of receipts, until they are taken."""
        self._calls: list[Call] = []
        self._live: set[Call] = set()
        self._states = [] if base is None else [base]
        """The last few distinct weights: equal ones are kept once."""
        self._lock = threading.Lock()

    def take_calls(self) -> list[Call]:
        """The calls since the last call of this method, except those that are still running."""
        with self._lock:
            done = [call for call in self._calls if call not in self._live]
            self._calls = [call for call in self._calls if call in self._live]
        return done

    def take_faults(self) -> list[str]:
        """Faults of receipts since the last call of this method."""
        faults, self.faults = self.faults, []
        return faults

    def begin(self, requests: Sequence[GenerationRequest]) -> Call:
        call = Call(tuple(requests), [self.served])
        with self._lock:
            self._calls.append(call)
            self._live.add(call)
        return call

    def give(self, call: Call, output: GenerationOutput) -> None:
        call.given.append(Given(output, np.array(output.token_ids), np.array(output.log_probs)))
        self.num_given += len(output.token_ids)

    def end(self, call: Call) -> None:
        with self._lock:
            self._live.discard(call)

    def live(self) -> list[Call]:
        with self._lock:
            return list(self._live)

    def serve(self, version: int, state: Mapping[str, Tensor] | None) -> None:
        """Records that these weights are served from now on; None: unknown weights."""
        self.served = Weights(version, None if state is None else self._kept(state))
        for call in self.live():
            call.served.append(self.served)

    def _kept(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """These weights, or earlier equal ones; None: they are incomplete or not finite."""
        for known in self._states:
            if all(torch.equal(tensor, state[name]) for name, tensor in known.items()):
                return known
        if not all(bool(tensor.isfinite().all()) for tensor in state.values()):
            return None
        self._states = [*self._states[:1], *self._states[1:][1 - MOST_STATES :], state]
        return state


class RecordingRolloutEngine(GuardedRolloutEngine):
    """The engine under test behind its guard. Records calls and answers without effect on the engine."""

    def __init__(self, engine: RolloutEngine, base: Mapping[str, Tensor] | None) -> None:
        """
        Args:
            engine: the engine under test.
            base: the weights that it serves as version 0, by canonical name; None: unknown, and so are updates.
        """
        super().__init__(engine)
        self.record = Record(base)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        call = self.record.begin(requests)
        try:
            stream = cast("AsyncGenerator[GenerationOutput, None]", super().generate(requests))
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    self.record.give(call, output)
                    yield output
            call.has_ended = True
        finally:
            self.record.end(call)

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        base = self.record.base
        copy = None if base is None else {name: torch.full_like(t, torch.nan) for name, t in base.items()}
        receipt = super().update_weights(_copied(shards, copy), version)
        self.record.serve(version, copy)
        self.record.faults += _wrong_receipt(receipt, self.record.served)
        return receipt

    def update_adapter(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_adapter(shards, version)
        self.record.serve(version, None)
        return receipt

    def receive_weights(self, deliveries: Sequence[Delivery], version: int) -> SyncReceipt:
        receipt = super().receive_weights(deliveries, version)
        self.record.serve(version, None)
        return receipt

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        for call in self.record.live():
            ids = {request.request_id for request in call.requests}
            call.aborted |= ids if request_ids is None else ids & set(request_ids)
        super().abort(request_ids)

    def resume(self, *, keep_cache: bool = False) -> None:
        for call in self.record.live() if keep_cache else []:
            call.is_stale = True
        super().resume(keep_cache=keep_cache)


def _wrong_receipt(receipt: SyncReceipt, served: Weights) -> list[str]:
    """False statements in the receipt of a float32 update, and values that are no plain data in any receipt."""
    unsent = [f"receipt of version {served.version}: {fault}" for fault in not_plain(receipt)]
    if unsent or served.state is None:
        return unsent
    served.identity()  # computes the fingerprints
    num_bytes = sum(4 * tensor.numel() for tensor in served.state.values())
    expected = (served.version, len(served.state), num_bytes)
    said = (receipt.version, receipt.num_tensors, receipt.num_bytes)
    faults = [f"receipt of version, tensors, bytes {said}, expected {expected}"] if said != expected else []
    if receipt.fingerprints != served.fingerprints:
        faults.append(f"receipt of version {served.version}: fingerprints are not of the weights that came")
    return faults


def _copied(shards: Iterable[WeightShard], into: Mapping[str, Tensor] | None) -> Iterator[WeightShard]:
    """The same shards; each is copied into its tensor before the engine gets it."""
    for shard in shards:
        if into is not None and shard.name in into:
            whole = into[shard.name]
            here = tuple(slice(at, at + size) for at, size in zip(shard.box.offset, shard.box.size, strict=True))
            if whole[here].shape == shard.tensor.shape:
                whole[here] = shard.tensor.detach().to("cpu", torch.float32)
        yield shard
