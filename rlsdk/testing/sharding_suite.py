"""ShardingConformance: what a ShardingManager has to hold, by requirement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from rlsdk.interfaces import (
    Box,
    Bucket,
    LayoutError,
    ReshardPlan,
    RlsdkError,
    ShardingManager,
    SyncReceipt,
    SyncReport,
    WeightLayout,
    WeightShard,
    WeightSyncError,
)
from rlsdk.registry import ComponentKind, Registry, Row
from rlsdk.testing.layouts import SHAPES, Pair, pairs, random_tensors
from rlsdk.testing.local_groups import LocalGroup, RolloutHost, TrainHost
from rlsdk.testing.requirements import Measured, requirement
from rlsdk.testing.tensor_engines import TensorRolloutEngine, TensorTrainEngine


class ShardingLab:
    """Builds managers over groups of engines that hold tensors and compute nothing."""

    def __init__(self, suite: type[ShardingConformance]) -> None:
        self.suite = suite
        self.manager_class = suite.registry().component(ComponentKind.SHARDING_MANAGER, suite.backend)
        self.tensors = random_tensors()

    def manager(
        self,
        pair: Pair,
        source: type[TrainHost] = TrainHost,
        engine: type[TensorRolloutEngine] = TensorRolloutEngine,
    ) -> ShardingManager:
        train = LocalGroup([source(TensorTrainEngine(self.tensors, layout)) for layout in pair.source], backend="train")
        rollout = LocalGroup([RolloutHost(engine(layouts)) for layouts in pair.replicas], backend="rollout")
        made: ShardingManager = self.manager_class(train, rollout, **self.suite.arguments)
        return made

    def plan(self, pair: Pair) -> ReshardPlan:
        return self.manager(pair).plan(tuple(pair.source), tuple(pair.target))

    def sync(self, manager: ShardingManager, pair: Pair, version: int) -> SyncReport:
        return manager.sync_weights(manager.plan(tuple(pair.source), tuple(pair.target)), version)

    def step(self, manager: ShardingManager) -> None:
        manager.train.run("optim_step")

    def differing(self, manager: ShardingManager, added: float = 0.0) -> list[str]:
        """Boxes that are not, bit for bit, what the source holds after its weights grew by `added`."""
        group: Any = manager.rollout
        found = []
        for replica, host in enumerate(group.hosts):
            for name, box, tensor in host.engine.served:
                right = (self.tensors[name] + added)[box.slices(Box.whole(SHAPES[name]))].to(tensor.dtype)
                if not torch.equal(tensor, right):
                    found.append(f"{name} {box.offset}+{box.size} of replica {replica}")
        return found

    def close(self) -> None:
        """Nothing to end: engines live in this process and hold small tensors."""


class ShardingConformance:
    """Subclass it with the name that a sharding manager is registered under (`train+rollout`, with `*` for any)."""

    backend: ClassVar[str] = ""
    arguments: ClassVar[dict[str, Any]] = {}
    """Of the manager's constructor, besides the two groups."""
    bucket_bytes: ClassVar[int | None] = None
    """Bound on a bucket that these arguments ask for; None: what the plan says of itself."""
    modules: ClassVar[Sequence[ModuleType]] = ()
    device: ClassVar[str] = "cpu"
    kind = ComponentKind.SHARDING_MANAGER

    @classmethod
    def registry(cls) -> Registry:
        registry = Registry.discover()
        for module in cls.modules:
            registry.register_module(module)
        return registry

    @classmethod
    def row(cls) -> Row:
        return cls.registry().row(cls.kind, cls.backend)

    @classmethod
    def make_lab(cls, folder: Path) -> ShardingLab:
        return ShardingLab(cls)

    @pytest.fixture
    def lab(self, rlsdk_lab: ShardingLab) -> ShardingLab:
        return rlsdk_lab

    @pytest.fixture
    def measured(self, request: pytest.FixtureRequest) -> Measured:
        return Measured(request.node.user_properties)

    @requirement("plan.cover")
    def test_cover(self, lab: ShardingLab, measured: Measured) -> None:
        """Every element that is wanted is sent once: no element is missing, and none comes twice."""
        for name, pair in pairs().items():
            measured.none(f"elements not sent once: {name}", not_once(lab.plan(pair), pair.target))

    @requirement("plan.bytes")
    def test_bytes(self, lab: ShardingLab, measured: Measured) -> None:
        """What crosses a process boundary is the least that could; sums are right, buckets of bounded size."""
        for name, pair in pairs().items():
            plan = lab.plan(pair)
            wanted = sum(box.numel * _width(layout) for layout in pair.target for _, box in layout.boxes)
            measured.equal(f"bytes: {name}", plan.num_bytes, wanted)
            measured.equal(f"bytes of its buckets: {name}", sum(b.num_bytes for b in plan.buckets), wanted)
            measured.equal(f"bytes that cross: {name}", plan.moved_bytes, plan.lower_bound_bytes)
            bound = lab.suite.bucket_bytes or plan.bucket_bytes
            measured.at_most(f"largest bucket: {name}", max(b.num_bytes for b in plan.buckets), bound)

    @requirement("plan.spread")
    def test_spread(self, lab: ShardingLab, measured: Measured) -> None:
        """Where copies of a shard are at hand, each sends its part: no rank sends twice an equal share."""
        pair = pairs()["copies of shards to whole"]
        loads = lab.plan(pair).source_load
        share = sum(loads.values()) / len(pair.source)
        measured.at_most("largest load over an equal share", max(loads.values()) / share, 2.0)

    @requirement("plan.pure")
    def test_pure(self, lab: ShardingLab, measured: Measured) -> None:
        """The same layouts give the same plan, and planning touches no weight."""
        pair = pairs()["sharded to tensor parallel"]
        manager = lab.manager(pair)
        first = manager.plan(tuple(pair.source), tuple(pair.target))
        second = lab.manager(pair).plan(tuple(pair.source), tuple(pair.target))
        assert first.buckets == second.buckets, "two plans of the same layouts differ"
        assert first.num_bytes == second.num_bytes
        pulls = sum(host.num_pulls for host in manager.rollout.hosts)  # type: ignore[attr-defined]
        measured.none("pulls that planning began", list(range(pulls)))

    @requirement("plan.refusals")
    def test_refusals(self, lab: ShardingLab, measured: Measured) -> None:
        """A box that nobody holds, a name that nobody knows and a shape that differs are a LayoutError."""
        pair = pairs()["sharded to whole, two replicas"]
        wrong = {
            "a rank is missing": (pair.source[1:], pair.target),
            "a name is unknown": (pair.source, [_renamed(layout) for layout in pair.target]),
            "a shape differs": ([_reshaped(layout) for layout in pair.source], pair.target),
        }
        accepted = []
        for name, (source, target) in wrong.items():
            with suppress(LayoutError):
                plan = lab.manager(pair).plan(tuple(source), tuple(target))
                accepted += [name] if plan.buckets else []
        measured.none("accepted", accepted)

    @requirement("sync.bitwise")
    def test_bitwise(self, lab: ShardingLab, measured: Measured) -> None:
        """Every replica serves the source's values bit for bit, and again after a step."""
        for name, pair in pairs().items():
            manager = lab.manager(pair)
            report = lab.sync(manager, pair, 1)
            measured.none(f"boxes that differ: {name}", lab.differing(manager))
            measured.equal(f"replicas with a receipt: {name}", len(report.receipts), len(pair.replicas))
            lab.step(manager)
            lab.sync(manager, pair, 2)
            measured.none(f"boxes that differ after a step: {name}", lab.differing(manager, added=0.125))

    @requirement("sync.proven")
    def test_proven(self, lab: ShardingLab, measured: Measured) -> None:
        """A replica that serves something else than it was sent, or less, is a WeightSyncError."""
        accepted = []
        for engine in (KeepsOneTensor, SaysAnotherVersion, LeavesTheRest):
            pair = pairs()["sharded to whole, two replicas"]
            manager = lab.manager(pair, engine=engine)
            with suppress(WeightSyncError):
                lab.sync(manager, pair, 1)
                lab.step(manager)
                lab.sync(manager, pair, 2)
                accepted.append(engine.__doc__)
        measured.none("accepted", accepted)

    @requirement("sync.unchanged")
    def test_unchanged(self, lab: ShardingLab, measured: Measured) -> None:
        """Weights that are all as they were at a lower version are a WeightSyncError: the steps did not reach them."""
        pair = pairs()["sharded to whole, two replicas"]
        manager = lab.manager(pair)
        lab.sync(manager, pair, 1)
        accepted = []
        with suppress(WeightSyncError):
            lab.sync(manager, pair, 2)
            accepted.append("version 2 with the weights of version 1")
        measured.none("accepted", accepted)

    @requirement("sync.interrupted")
    def test_interrupted(self, lab: ShardingLab, measured: Measured) -> None:
        """A source that breaks off in the middle is an error; no replica serves a mixture, and the next sync mends."""
        pair = pairs()["sharded to tensor parallel"]
        manager = lab.manager(pair, source=BreaksOff)
        hosts: Any = manager.train
        for host in hosts.hosts:
            host.left = 10**6
        lab.sync(manager, pair, 1)
        lab.step(manager)
        total = len(lab.plan(pair).buckets)
        accepted, mixtures = [], []
        for after in (0, 1, total // len(hosts.hosts) // 2):
            for host in hosts.hosts:
                host.left = after
            with suppress(RlsdkError, OSError):
                lab.sync(manager, pair, 2)
                accepted.append(f"broken off after {after} buckets of each rank")
            old, new = lab.differing(manager), lab.differing(manager, added=0.125)
            mixtures += [f"after {after} buckets"] if old and new else []
        measured.none("accepted", accepted)
        measured.none("mixtures served", mixtures)
        for host in hosts.hosts:
            host.left = 10**6
        lab.sync(manager, pair, 2)
        measured.none("boxes that differ after the next sync", lab.differing(manager, added=0.125))


class BreaksOff(TrainHost):
    """Hands out so many buckets, then fails."""

    left = 0

    def export_weights(self, bucket: Bucket) -> Any:
        self.left -= 1
        if self.left < 0:
            raise OSError("the line is dead")
        return super().export_weights(bucket)


class KeepsOneTensor(TensorRolloutEngine):
    """keeps one tensor as it was"""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        old = {(name, box): tensor.clone() for name, box, tensor in self.served if name == "norm.weight"}
        receipt = super().update_weights(shards, version)
        for name, box, tensor in self.served:
            if (name, box) in old:
                tensor.copy_(old[name, box])
        return replace(receipt, fingerprints=self.fingerprints())


class SaysAnotherVersion(TensorRolloutEngine):
    """says that it serves another version"""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        return replace(super().update_weights(shards, version), version=version - 1)


class LeavesTheRest(TensorRolloutEngine):
    """takes a part of what comes and says that it is all"""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        for at, _ in enumerate(shards):
            if at == 1:
                break
        return SyncReceipt(version=version, num_tensors=1, num_bytes=0, fingerprints=self.fingerprints())


def not_once(plan: ReshardPlan, target: Sequence[WeightLayout]) -> list[str]:
    """Boxes of the target with an element that does not come exactly once."""
    counts = [
        [(name, box, torch.zeros(box.size, dtype=torch.int32)) for name, box in layout.boxes] for layout in target
    ]
    stray = 0
    for bucket in plan.buckets:
        for transfer in bucket.transfers:
            placed = 0
            for name, box, count in counts[bucket.target]:
                common = box.intersect(transfer.box) if name == transfer.name else None
                if common is not None:
                    count[common.slices(box)] += 1
                    placed += common.numel
            stray += transfer.box.numel - placed
    faults = [f"{stray} elements that nobody wants"] if stray else []
    return faults + [
        f"{name} {box.offset}+{box.size} of target {at}: {int((count != 1).sum())} elements"
        for at, entries in enumerate(counts)
        for name, box, count in entries
        if bool((count != 1).any())
    ]


def _width(layout: WeightLayout) -> int:
    return int(getattr(torch, layout.tensors[0].dtype).itemsize)


def _renamed(layout: WeightLayout) -> WeightLayout:
    names = {"norm.weight": "norms.weight"}
    return replace(
        layout,
        tensors=tuple(replace(meta, name=names.get(meta.name, meta.name)) for meta in layout.tensors),
        boxes=tuple((names.get(name, name), box) for name, box in layout.boxes),
    )


def _reshaped(layout: WeightLayout) -> WeightLayout:
    return replace(
        layout,
        tensors=tuple(
            replace(meta, shape=(*meta.shape[:-1], 13)) if meta.name == "norm.weight" else meta
            for meta in layout.tensors
        ),
    )
