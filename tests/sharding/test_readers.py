"""Replicas that want the same weights read them from the same slots of one ring."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from sharding_cases import dim0_sharded, random_tensors, train_group, whole_target

from rlsdk.interfaces import Box, Bucket, SyncReceipt, WeightLayout, WeightShard, WeightSyncError
from rlsdk.kit.ranks.shared_memory import AttachError
from rlsdk.sharding import TRANSPORTS, GenericShardingManager, plan_reshard
from rlsdk.sharding.transports import ring as ring_module
from rlsdk.sharding.transports.ring import PipeGoneError
from rlsdk.sharding.transports.ring_transport import RingTransport
from rlsdk.sharding.transports.transport import Outgoing
from rlsdk.testing.sharding.local_groups import LocalGroup, LocalPeer, RolloutHost, TrainHost
from rlsdk.testing.sharding.tensor_engines import TensorRolloutEngine

SHAPES = {"embed": (400, 8), "layer.w": (160, 24), "layer.b": (24,), "norm": (8,)}
BUCKET_BYTES = 4096
SOURCES = 2


def replicas(count: int) -> list[WeightLayout]:
    return [whole_target(SHAPES, rank) for rank in range(count)]


def readers(target: Sequence[WeightLayout], source: Sequence[WeightLayout] | None = None) -> list[set[tuple[int, ...]]]:
    """By target, the readers that its buckets name."""
    given = source or dim0_sharded(SHAPES, SOURCES)
    plan = plan_reshard(given, target, bucket_bytes=BUCKET_BYTES, transports=TRANSPORTS)
    return [{bucket.readers for bucket in part} for part in plan.parts]


def test_replicas_of_a_node_share_a_ring_and_a_single_one_has_its_own() -> None:
    assert readers(replicas(3)) == [{(0, 1, 2)}] * 3
    assert readers(replicas(1)) == [{()}]


def test_those_that_want_another_order_or_are_on_another_node_share_none() -> None:
    first, second, third, fourth = replicas(4)
    reversed_ = replace(second, boxes=second.boxes[::-1], tensors=second.tensors[::-1])
    found = readers([first, reversed_, third, replace(fourth, node="elsewhere")])
    assert found == [{(0, 2)}, {()}, {(0, 2)}, {()}]


def test_places_of_one_process_share_none_since_they_receive_one_after_the_other() -> None:
    first, second, third = replicas(3)
    assert readers([first, replace(second, process=first.process), third]) == [{()}] * 3


def test_a_replica_beside_a_rank_reads_that_rank_in_place_and_the_others_by_their_rings() -> None:
    source = dim0_sharded(SHAPES, 3)
    target = [replace(layout, process=source[rank].process) for rank, layout in enumerate(replicas(3))]
    assert readers(target, source) == [{(), (0, 1), (0, 2)}, {(), (0, 1), (1, 2)}, {(), (0, 2), (1, 2)}]


class Groups:
    """Two sources, and replicas of one process each; counts the buckets that sources write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engines: Sequence[TensorRolloutEngine]) -> None:
        self.values = random_tensors(SHAPES)
        self.train = train_group(self.values, dim0_sharded(SHAPES, SOURCES))
        self.train.peers = lambda: [LocalPeer(host, is_local=False) for host in self.train.hosts]  # type: ignore[method-assign]
        self.rollout = LocalGroup([RolloutHost(engine) for engine in engines])
        self.filled = 0
        fill = RingTransport._fill

        def counted(*args: Any) -> None:
            self.filled += 1
            fill(*args)

        monkeypatch.setattr(RingTransport, "_fill", counted)

    def manager(self, rollout: LocalGroup | None = None, timeout_s: float = 20.0) -> GenericShardingManager:
        return GenericShardingManager(
            self.train,
            rollout or self.rollout,
            bucket_bytes=BUCKET_BYTES,
            timeout_s=timeout_s,
            transports=["ring", "object_store"],
        )

    def step(self) -> None:
        self.train.run("optim_step")
        self.values = {name: tensor + 0.125 for name, tensor in self.values.items()}

    def check_served(self, *only: int) -> None:
        for at in only or range(len(self.rollout.hosts)):
            for name, _, tensor in self.rollout.hosts[at].engine.served:
                assert torch.equal(tensor, self.values[name])

    def close(self) -> None:
        for host in self.rollout.hosts:
            host.target.close()
        for host in self.train.hosts:
            host.source.close()


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[Groups]:
    groups = Groups(monkeypatch, [TensorRolloutEngine([layout]) for layout in replicas(3)])
    yield groups
    groups.close()


def test_a_source_writes_each_bucket_once_for_all_replicas(three: Groups) -> None:
    manager = three.manager()
    plan = manager.plan(manager.ends().source, manager.ends().target)
    assert len(plan.parts[0]) > 2 * SOURCES
    for version in range(1, 4):
        three.filled = 0
        report = manager.sync(version)
        assert report.transports == ("ring",)
        assert three.filled == len(plan.parts[0])
        three.check_served()
        three.step()


class SlowEngine(TensorRolloutEngine):
    """Loads so slowly that the others wait for it all the time."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        def slowly() -> Iterator[WeightShard]:
            for shard in shards:
                time.sleep(0.002)
                yield shard

        return super().update_weights(slowly(), version)


def test_replicas_of_different_speed_all_get_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    quick, slow = replicas(2)
    groups = Groups(monkeypatch, [TensorRolloutEngine([quick]), SlowEngine([slow])])
    manager = groups.manager()
    for version in (1, 2):
        manager.sync(version)
        groups.check_served()
        groups.step()
    groups.close()


class FailingEngine(TensorRolloutEngine):
    """Breaks off in the middle of its first update."""

    failed = False

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        if not self.failed:
            self.failed = True
            next(iter(shards))
            raise OSError("the engine gave up")
        return super().update_weights(shards, version)


def test_a_replica_that_breaks_off_does_not_hold_the_others_up_and_the_next_sync_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second, third = replicas(3)
    engines = [TensorRolloutEngine([first]), FailingEngine([second]), TensorRolloutEngine([third])]
    groups = Groups(monkeypatch, engines)
    manager = groups.manager()
    start = time.monotonic()
    with pytest.raises(OSError, match="the engine gave up"):
        manager.sync(1)
    assert time.monotonic() - start < 10
    groups.check_served(0, 2)
    groups.step()
    manager.sync(2)
    groups.check_served()
    groups.close()


def test_a_replica_that_never_asked_before_it_broke_off_gets_the_next_weights_even_if_it_asks_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second source, whose buckets fit into the slots, waited for nobody, and still offered it what the others had
    fetched in the sync before."""
    groups = Groups(monkeypatch, [TensorRolloutEngine([layout]) for layout in replicas(3)])
    manager, export = groups.manager(), TrainHost.export_weights
    asked = threading.Event()

    def refused(host: TrainHost, buckets: Sequence[Bucket], sync: str = "") -> Sequence[Mapping[str, Any]]:
        if (buckets[0].target, buckets[0].source) == (1, 1):
            raise OSError("the line is dead")
        return export(host, buckets, sync)

    def it_first(host: TrainHost, buckets: Sequence[Bucket], sync: str = "") -> Sequence[Mapping[str, Any]]:
        if buckets[0].target != 1 and buckets[0].source == 1:
            assert asked.wait(20)
        handles = export(host, buckets, sync)
        if (buckets[0].target, buckets[0].source) == (1, 1):
            asked.set()
        return handles

    monkeypatch.setattr(TrainHost, "export_weights", refused)
    with pytest.raises(WeightSyncError, match="the line is dead"):
        manager.sync(1)
    groups.check_served(0, 2)
    groups.step()
    monkeypatch.setattr(TrainHost, "export_weights", it_first)
    start = time.monotonic()
    manager.sync(2)
    assert time.monotonic() - start < 10
    groups.check_served()
    groups.close()


def test_a_replica_that_cannot_open_the_ring_takes_another_way_and_the_others_keep_it(
    three: Groups, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened: list[str] = []
    open_memory = ring_module.open_memory

    def closed(exported: Mapping[str, Any], device: torch.device | None) -> torch.Tensor:
        opened.append(exported["credits"])
        if len(opened) == 1:
            raise AttachError("cannot open the source's shared memory: Permission denied")
        return open_memory(exported, device)

    monkeypatch.setattr(ring_module, "open_memory", closed)
    manager = three.manager()
    for version in (1, 2, 3):
        manager.sync(version)
        three.check_served()
        three.step()
    assert caplog.text.count("cannot come by ring") == 1
    assert "from now on by object_store" in caplog.text


def test_a_replica_whose_pull_never_begins_is_dropped_from_the_ring(
    three: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others do not wait for it until the deadline."""
    monkeypatch.setattr(ring_module, "ATTACH_S", 0.2)
    manager = three.manager(timeout_s=60.0)

    def gone(*args: Any) -> SyncReceipt:
        raise WeightSyncError("the actor died")

    monkeypatch.setattr(three.rollout.hosts[2], "pull_weights", gone)
    start = time.monotonic()
    with pytest.raises(WeightSyncError, match="the actor died"):
        manager.sync(1)
    assert time.monotonic() - start < 20
    three.check_served(0, 1)


def test_replicas_that_are_synced_alone_and_together_get_rings_of_their_own(
    three: Groups, caplog: pytest.LogCaptureFixture
) -> None:
    """As after one was restarted. In its manager's plan it has the number that another replica has in that of all."""
    managers = [three.manager(), *(three.manager(LocalGroup([host])) for host in three.rollout.hosts[1:])]
    for version in range(1, 4):
        for manager in managers:
            manager.sync(version, expect_change=False)
        three.check_served()
        three.step()
    assert "cannot come by" not in caplog.text


def shards(value: float) -> list[WeightShard]:
    """More than a ring holds."""
    return [WeightShard(name="w", box=Box.whole((1 << 18,)), tensor=torch.full((1 << 18,), value)) for _ in range(9)]


METAS = [((1 << 18,), "float32")] * 9


def ask(source: RingTransport, reader: int, value: float) -> Mapping[str, Any]:
    (handle,) = source.export([Outgoing.of(shards(value), ["float32"] * 9)], reader)
    return handle


def test_a_pull_of_a_sync_that_was_broken_off_may_come_late_and_delays_the_next_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first reader fails and repeats, before the second has begun: that one takes the repeated stream twice."""
    monkeypatch.setattr(ring_module, "ATTACH_S", 0.2)
    source, first, second = RingTransport(2), RingTransport(), RingTransport()
    next(first.fetch(ask(source, 0, 1.0), METAS))
    first.close()
    again, late = ask(source, 0, 2.0), ask(source, 1, 2.0)
    with ThreadPoolExecutor(2) as pool:
        pulls = [pool.submit(list, end.fetch(handle, METAS)) for end, handle in ((first, again), (second, late))]
        assert [len(pull.result(20)) for pull in pulls] == [9, 9]
    start = time.monotonic()
    assert sum(float(tensor.mean()) for tensor in second.fetch(ask(source, 1, 3.0), METAS)) == 27.0
    assert time.monotonic() - start < 15
    with pytest.raises(PipeGoneError, match="a ring of its own"):
        ask(source, 0, 4.0)
    assert sum(float(tensor.mean()) for tensor in second.fetch(ask(source, 1, 4.0), METAS)) == 36.0
    for end in (source, first, second):
        end.close()


def test_a_thread_of_a_pull_that_broke_off_does_not_start_its_sync_once_more(three: Groups) -> None:
    manager = three.manager()
    ends = manager.ends()
    (first, *_) = (part for part in manager.plan(ends.source, ends.target).parts if part)
    source = three.train.hosts[first[0].source]
    buckets = [bucket for bucket in first if bucket.source == first[0].source]
    source.export_weights(buckets, "first")
    source.export_weights(buckets, "second")
    with pytest.raises(WeightSyncError, match="of a sync that is over"):
        source.export_weights(buckets, "first")
    manager.sync(1)
    three.check_served()


def test_readers_of_a_ring_that_ask_for_different_buckets_are_refused() -> None:
    source = RingTransport(2)
    ask(source, 0, 1.0)
    with pytest.raises(WeightSyncError, match="targets that share a ring asked for different buckets"):
        source.export([Outgoing.of(shards(1.0)[:3], ["float32"] * 3)], 1)
    source.close()
