"""Test harness for sharding managers: groups of engines that hold tensors but compute nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlsdk.interfaces import (
    DTYPE_BYTES,
    Box,
    Bucket,
    Relay,
    ReshardPlan,
    ShardingManager,
    SyncReceipt,
    SyncReport,
    Transfer,
    WeightLayout,
    WeightShard,
    WorkerError,
)
from rlsdk.registry import ComponentKind
from rlsdk.testing.sharding.layouts import Pair, pairs, random_tensors
from rlsdk.testing.sharding.local_groups import LocalGroup, RolloutHost, TrainHost
from rlsdk.testing.sharding.oracle import Held, held_by_sources, same_bits, wrong_sync
from rlsdk.testing.sharding.tensor_engines import TensorRolloutEngine, TensorTrainEngine

if TYPE_CHECKING:
    from rlsdk.testing.sharding.settings import ShardingSettings
    from rlsdk.testing.suites.requirements import Measured


@dataclass
class WatchedGroup(LocalGroup):
    """Records the calls of its hosts, and their deadlines."""

    calls: list[tuple[str, float | None]] = field(default_factory=list)
    dead: bool = False
    """Whether every call of all hosts fails."""

    def run(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        if self.dead:
            raise WorkerError(f"{self.backend}: the process has died")
        self.calls.append((method, timeout_s))
        return super().run(method, *args, timeout_s=timeout_s, **kwargs)

    def run_each(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        self.calls.append((method, timeout_s))
        return super().run_each(method, arguments, timeout_s)


class WatchedEngine(TensorRolloutEngine):
    """Records the names of the received tensors, in order."""

    arrived: Sequence[str] = ()
    pause_s = 0.0
    """Seconds that it takes to load an item."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        names: list[str] = []

        def watched() -> Iterator[WeightShard]:
            for shard in shards:
                names.append(shard.name)
                time.sleep(self.pause_s)
                yield shard

        self.arrived = names
        return super().update_weights(watched(), version)


class WatchedTrainHost(TrainHost):
    """Fails on request."""

    left = 10**9
    """Number of buckets that it exports before it fails."""
    proof_error: Exception | None = None
    """Raised in place of fingerprints."""
    proof_s = 0.0
    """Seconds that it takes to compute fingerprints."""

    def export_weights(self, buckets: Sequence[Bucket], sync: str = "") -> Sequence[Mapping[str, Any]]:
        there = buckets[: max(self.left, 0)]
        self.left -= len(buckets)
        if not there:
            raise OSError("the line is dead")
        # The remaining buckets fail later.
        return [*super().export_weights(there, sync), *({} for _ in buckets[len(there) :])]

    def weight_fingerprints(self, transfers: Sequence[Transfer]) -> Mapping[str, int]:
        if self.proof_error is not None:
            raise self.proof_error
        time.sleep(self.proof_s)
        return super().weight_fingerprints(transfers)


class WatchedRolloutHost(RolloutHost):
    """Records what it was asked to pull; `before` and `after` may fail or return another receipt."""

    def __init__(self, engine: WatchedEngine) -> None:
        super().__init__(engine)
        self.serving = engine
        self.pulls: list[tuple[Sequence[Bucket], frozenset[int], int, float]] = []
        self.lie: Any = None
        """Called with this host, the previous receipt and a function that pulls; returns the receipt."""
        self.relays: list[Relay | None] = []
        """For each pull: its part in forwarding weights."""
        self.receipt: SyncReceipt | None = None
        self.dead = False

    def pass_on_weights(self, buckets: Sequence[Bucket], sync: str, timeout_s: float) -> Sequence[Mapping[str, Any]]:
        if self.dead:
            raise WorkerError("the replica's process has died")
        return super().pass_on_weights(buckets, sync, timeout_s)

    def pull_weights(
        self,
        buckets: Sequence[Bucket],
        peers: Mapping[int, Any],
        version: int,
        timeout_s: float,
        relay: Relay | None = None,
    ) -> SyncReceipt:
        self.pulls.append((tuple(buckets), frozenset(peers), version, timeout_s))
        self.relays.append(relay)

        def pull() -> SyncReceipt:
            return super(WatchedRolloutHost, self).pull_weights(buckets, peers, version, timeout_s, relay)

        self.receipt = pull() if self.lie is None else self.lie(self, self.receipt, pull)
        return self.receipt


class Trial:
    """A manager with its own groups, and the weights that it should transfer."""

    def __init__(self, lab: ShardingLab, pair: Pair, tensors: Mapping[str, Tensor] | None = None, **arguments: Any):
        self.pair = pair
        dtypes = {meta.name: getattr(torch, meta.dtype) for layout in pair.source for meta in layout.tensors}
        given = random_tensors() if tensors is None else tensors
        self.truth = {name: given[name].to(dtype, copy=True) for name, dtype in dtypes.items()}
        """Name in the sources -> the whole tensor in their dtype."""
        self.tied = {name: held for layout in pair.source for name, held in layout.tied.items()}
        self.sources = [WatchedTrainHost(TensorTrainEngine(self.truth, layout)) for layout in pair.source]
        self.replicas = [WatchedRolloutHost(WatchedEngine(layouts)) for layouts in pair.replicas]
        self.train = WatchedGroup(self.sources, backend="train")
        self.rollout = WatchedGroup(self.replicas, backend="rollout")
        made: ShardingManager = lab.manager_class(self.train, self.rollout, **{**lab.suite.arguments, **arguments})
        self.manager = made
        self._lab = lab
        self._before: Held | None = None
        """Weights of the sources at the last successful sync."""

    def plan(self) -> ReshardPlan:
        return self.manager.plan(tuple(self.pair.source), tuple(self.pair.target))

    def sync(self, version: int, *, expect_change: bool | None = None) -> SyncReport:
        report = self.manager.sync(version, expect_change=expect_change)
        # Lies are tested by their own requirements.
        if all(host.lie is None for host in self.replicas):
            self._lab.faults += wrong_sync(self, report, version, self._before)
        self._before = held_by_sources(self)
        return report

    def step(self, *, without: Sequence[int] = ()) -> None:
        """Increases every element on every rank except those of `without`."""
        for tensor in self.truth.values():
            tensor += 1 if tensor.dtype is torch.bool or not tensor.is_floating_point() else 0.125
        self.load(without=without)

    def load(self, *, without: Sequence[int] = ()) -> None:
        """Writes `truth` to the ranks, except those of `without`."""
        for rank, host in enumerate(self.sources):
            engine: Any = host.engine
            for name, box, tensor in engine.held if rank not in without else ():
                tensor.copy_(self.truth[name][box.slices(Box.whole(self.truth[name].shape))])

    def scatter(self) -> None:
        """Moves the ranks' tensors to memory that is not contiguous: every second element of a longer row."""
        for host in self.sources:
            engine: Any = host.engine
            engine.held = [
                (name, box, torch.stack((tensor, tensor), -1)[..., 0] if tensor.dim() else tensor)
                for name, box, tensor in engine.held
            ]

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of `truth`."""
        return {name: tensor.clone() for name, tensor in self.truth.items()}

    def differing(self, truth: Mapping[str, Tensor] | None = None) -> list[str]:
        """Boxes that differ in any bit from the weights of the sources (or from `truth`)."""
        return [what for replica in range(len(self.replicas)) for what in self.differing_of(replica, truth)]

    def differing_of(self, replica: int, truth: Mapping[str, Tensor] | None = None) -> list[str]:
        """As `differing`, for one replica."""
        values = self.truth if truth is None else truth
        found = []
        for name, box, tensor in self.replicas[replica].serving.served:
            whole = values[self.tied.get(name, name) if name not in values else name]
            if not same_bits(tensor, whole[box.slices(Box.whole(tuple(whole.shape)))].to(tensor.dtype)):
                found.append(f"{name} {box.offset}+{box.size} of replica {replica}")
        return found

    def restart(self, replica: int) -> None:
        """Starts a replica anew, as another host; the old one can no longer be called."""
        old = self.replicas[replica]
        self.replicas[replica] = WatchedRolloutHost(WatchedEngine(self.pair.replicas[replica]))
        self.replicas[replica].relays = old.relays
        old.dead = True

    def forget(self, replica: int) -> None:
        """Restarts a replica: it serves zeros."""
        for _, _, tensor in self.replicas[replica].serving.served:
            tensor.zero_()


class ShardingLab:
    """Builds managers."""

    def __init__(self, suite: type[ShardingSettings]) -> None:
        self.suite = suite
        self.faults: list[str] = []
        """Faults of all syncs in the running requirement."""
        self.manager_class = suite.registry().component(ComponentKind.SHARDING_MANAGER, suite.backend)

    def trial(self, pair: Pair, tensors: Mapping[str, Tensor] | None = None, **arguments: Any) -> Trial:
        return Trial(self, pair, tensors, **arguments)

    def plan(self, pair: Pair) -> ReshardPlan:
        """The plan of a new manager. Its own groups are of another pair: planning does not use them."""
        manager = self.trial(pairs()["one rank to one"]).manager
        return manager.plan(tuple(pair.source), tuple(pair.target))

    def verify(self, measured: Measured) -> None:
        """Checks the invariants of every sync on the syncs of the requirement that has ended."""
        faults, self.faults = self.faults, []
        if faults:
            measured.none("syncs that did otherwise than they say", faults)

    def forget(self) -> None:
        """Drops the records of a requirement that failed."""
        self.faults = []

    def close(self) -> None:
        """Does nothing: engines are in this process and hold small tensors."""


def wire_dtypes(source: Sequence[WeightLayout], target: Sequence[WeightLayout]) -> dict[str, str]:
    """Dtype in which each wanted tensor is sent: the narrower of the source's and the target's."""
    held = {meta.name: meta.dtype for layout in source for meta in layout.tensors}
    names = {name: own for layout in source for name, own in layout.tied.items()}
    return {
        meta.name: min(meta.dtype, held[held_name(meta.name, held, names)], key=DTYPE_BYTES.__getitem__)
        for layout in target
        for meta in layout.tensors
    }


def held_name(name: str, held: Mapping[str, Any], tied: Mapping[str, str]) -> str:
    """Name in the sources of the tensor that a target calls `name`."""
    return name if name in held else tied.get(name, name)


def wanted_boxes(pair: Pair) -> Iterator[tuple[int, str, Box]]:
    """(index of the target, name, box) of every wanted box."""
    for at, layout in enumerate(pair.target):
        for name, box in layout.boxes:
            yield at, name, box
