"""Test harness for sharding managers: groups of engines that hold tensors and compute nothing."""

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
)
from rlsdk.registry import ComponentKind
from rlsdk.testing.layouts import Pair, pairs, random_tensors
from rlsdk.testing.local_groups import LocalGroup, RolloutHost, TrainHost
from rlsdk.testing.sharding_oracle import Held, held_by_sources, wrong_sync
from rlsdk.testing.tensor_engines import TensorRolloutEngine, TensorTrainEngine

if TYPE_CHECKING:
    from rlsdk.testing.requirements import Measured
    from rlsdk.testing.sharding_suite import ShardingConformance


@dataclass
class WatchedGroup(LocalGroup):
    """Remembers what its hosts were called for, and how long the caller was ready to wait."""

    calls: list[tuple[str, float | None]] = field(default_factory=list)

    def run(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        self.calls.append((method, timeout_s))
        return super().run(method, *args, timeout_s=timeout_s, **kwargs)

    def run_each(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        self.calls.append((method, timeout_s))
        return super().run_each(method, arguments, timeout_s)


class WatchedEngine(TensorRolloutEngine):
    """Remembers the names of what came, in order."""

    arrived: Sequence[str] = ()

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        names: list[str] = []

        def watched() -> Iterator[WeightShard]:
            for shard in shards:
                names.append(shard.name)
                yield shard

        self.arrived = names
        return super().update_weights(watched(), version)


class WatchedTrainHost(TrainHost):
    """Fails when it is told to."""

    left = 10**9
    """Buckets that it hands out before it fails."""
    fails_fingerprints = False
    proof_s = 0.0
    """Seconds that its fingerprints take."""

    def export_weights(self, buckets: Sequence[Bucket]) -> Sequence[Mapping[str, Any]]:
        there = buckets[: max(self.left, 0)]
        self.left -= len(buckets)
        if not there:
            raise OSError("the line is dead")
        # The rest breaks off when its turn comes.
        return [*super().export_weights(there), *({} for _ in buckets[len(there) :])]

    def weight_fingerprints(self, transfers: Sequence[Transfer]) -> Mapping[str, int]:
        if self.fails_fingerprints:
            raise OSError("no fingerprints")
        time.sleep(self.proof_s)
        return super().weight_fingerprints(transfers)


class WatchedRolloutHost(RolloutHost):
    """Remembers what it was asked to pull; `before` and `after` may fail, or make another receipt."""

    def __init__(self, engine: WatchedEngine) -> None:
        super().__init__(engine)
        self.serving = engine
        self.pulls: list[tuple[Sequence[Bucket], frozenset[int], int, float]] = []
        self.lie: Any = None
        """Called with this host, the receipt of before and a function that pulls; gives the receipt."""
        self.relays: list[Relay | None] = []
        """By pull: its part in passing weights on."""
        self.receipt: SyncReceipt | None = None

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
    """A manager over groups of its own, and the weights that it should bring."""

    def __init__(self, lab: ShardingLab, pair: Pair, tensors: Mapping[str, Tensor] | None = None, **arguments: Any):
        self.pair = pair
        dtypes = {meta.name: getattr(torch, meta.dtype) for layout in pair.source for meta in layout.tensors}
        given = random_tensors() if tensors is None else tensors
        self.truth = {name: given[name].to(dtype, copy=True) for name, dtype in dtypes.items()}
        """Name, as the sources hold it -> the whole tensor in their dtype."""
        self.tied = {name: held for layout in pair.source for name, held in layout.tied.items()}
        self.sources = [WatchedTrainHost(TensorTrainEngine(self.truth, layout)) for layout in pair.source]
        self.replicas = [WatchedRolloutHost(WatchedEngine(layouts)) for layouts in pair.replicas]
        self.train = WatchedGroup(self.sources, backend="train")
        self.rollout = WatchedGroup(self.replicas, backend="rollout")
        made: ShardingManager = lab.manager_class(self.train, self.rollout, **{**lab.suite.arguments, **arguments})
        self.manager = made
        self._lab = lab
        self._before: Held | None = None
        """What sources held at the last sync that succeeded."""

    def plan(self) -> ReshardPlan:
        return self.manager.plan(tuple(self.pair.source), tuple(self.pair.target))

    def sync(self, version: int, *, expect_change: bool | None = None) -> SyncReport:
        report = self.manager.sync(version, expect_change=expect_change)
        # Whether a lie is told is what its own requirement asks.
        if all(host.lie is None for host in self.replicas):
            self._lab.faults += wrong_sync(self, report, version, self._before)
        self._before = held_by_sources(self)
        return report

    def step(self, *, without: Sequence[int] = ()) -> None:
        """Every element of every rank grows, but for those ranks that stay as they are."""
        for tensor in self.truth.values():
            tensor += 1 if tensor.dtype is torch.bool or not tensor.is_floating_point() else 0.125
        self.load(without=without)

    def load(self, *, without: Sequence[int] = ()) -> None:
        """Has the ranks hold `truth`."""
        for rank, host in enumerate(self.sources):
            engine: Any = host.engine
            for name, box, tensor in engine.held if rank not in without else ():
                tensor.copy_(self.truth[name][box.slices(Box.whole(self.truth[name].shape))])

    def scatter(self) -> None:
        """Has the ranks hold their tensors in memory that is not contiguous: every second element of a longer row."""
        for host in self.sources:
            engine: Any = host.engine
            engine.held = [
                (name, box, torch.stack((tensor, tensor), -1)[..., 0] if tensor.dim() else tensor)
                for name, box, tensor in engine.held
            ]

    def snapshot(self) -> dict[str, Tensor]:
        """What `truth` is now."""
        return {name: tensor.clone() for name, tensor in self.truth.items()}

    def differing(self, truth: Mapping[str, Tensor] | None = None) -> list[str]:
        """Boxes that are not, bit for bit, what the sources hold (or held)."""
        return [what for replica in range(len(self.replicas)) for what in self.differing_of(replica, truth)]

    def differing_of(self, replica: int, truth: Mapping[str, Tensor] | None = None) -> list[str]:
        """As `differing`, of one replica."""
        values = self.truth if truth is None else truth
        found = []
        for name, box, tensor in self.replicas[replica].serving.served:
            whole = values[self.tied.get(name, name) if name not in values else name]
            if not same_bits(tensor, whole[box.slices(Box.whole(tuple(whole.shape)))].to(tensor.dtype)):
                found.append(f"{name} {box.offset}+{box.size} of replica {replica}")
        return found

    def forget(self, replica: int) -> None:
        """A replica that was started again: it serves zeros."""
        for _, _, tensor in self.replicas[replica].serving.served:
            tensor.zero_()


class ShardingLab:
    """Builds managers."""

    def __init__(self, suite: type[ShardingConformance]) -> None:
        self.suite = suite
        self.faults: list[str] = []
        """Of all syncs in the requirement that runs."""
        self.manager_class = suite.registry().component(ComponentKind.SHARDING_MANAGER, suite.backend)

    def trial(self, pair: Pair, tensors: Mapping[str, Tensor] | None = None, **arguments: Any) -> Trial:
        return Trial(self, pair, tensors, **arguments)

    def plan(self, pair: Pair) -> ReshardPlan:
        """A new manager's. Its own groups are of another pair: planning has no use for them."""
        manager = self.trial(pairs()["one rank to one"]).manager
        return manager.plan(tuple(pair.source), tuple(pair.target))

    def verify(self, measured: Measured) -> None:
        """What holds for every sync held in the requirement that has ended, whatever it looked at."""
        faults, self.faults = self.faults, []
        if faults:
            measured.none("syncs that did otherwise than they say", faults)

    def forget(self) -> None:
        """Drops what was written down of a requirement that failed by itself."""
        self.faults = []

    def close(self) -> None:
        """Nothing to end: engines live in this process and hold small tensors."""


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit: zeros of another sign differ, and NaN may be equal."""
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def wire_dtypes(source: Sequence[WeightLayout], target: Sequence[WeightLayout]) -> dict[str, str]:
    """Dtype in which every wanted tensor travels: the narrower of what is held and what is wanted."""
    held = {meta.name: meta.dtype for layout in source for meta in layout.tensors}
    names = {name: own for layout in source for name, own in layout.tied.items()}
    return {
        meta.name: min(meta.dtype, held[held_name(meta.name, held, names)], key=DTYPE_BYTES.__getitem__)
        for layout in target
        for meta in layout.tensors
    }


def held_name(name: str, held: Mapping[str, Any], tied: Mapping[str, str]) -> str:
    """Under which the sources hold what a target calls `name`."""
    return name if name in held else tied.get(name, name)


def wanted_boxes(pair: Pair) -> Iterator[tuple[int, str, Box]]:
    """(index of the target, name, box) of all that targets want."""
    for at, layout in enumerate(pair.target):
        for name, box in layout.boxes:
            yield at, name, box
