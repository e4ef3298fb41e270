"""Whole syncs by the generic manager: bitwise in every layout, and loud about every way they can go wrong."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding_cases import (
    dim0_sharded,
    random_tensors,
    rollout_group,
    shapes,
    sources,
    targets,
    train_group,
    whole_target,
)
from torch import Tensor

from rlsdk.interfaces import Box, Bucket, SyncReceipt, SyncReport, WeightShard, WeightSyncError
from rlsdk.kit.ranks.shared_memory import share
from rlsdk.sharding import GenericShardingManager
from rlsdk.sharding.transports.ring import RingWriter
from rlsdk.sharding.transports.ring_transport import RingTransport
from rlsdk.testing.sharding.local_groups import LocalGroup, LocalPeer, RolloutHost, TrainHost
from rlsdk.testing.sharding.tensor_engines import TensorRolloutEngine, TensorTrainEngine

SHAPES = {"embed": (40, 8), "layer.w": (16, 24), "layer.b": (24,), "norm": (8,)}


def sync(manager: GenericShardingManager, version: int, **options: Any) -> SyncReport:
    ends = manager.ends()
    return manager.sync_weights(manager.plan(ends.source, ends.target), version, **options)


def served(group: LocalGroup) -> list[tuple[str, Box, Tensor]]:
    return [entry for host in group.hosts for entry in host.engine.served]


def make(
    parts: int = 2,
    num_replicas: int = 2,
    dtype: str = "float32",
    engine: type[TensorRolloutEngine] = TensorRolloutEngine,
    transports: Sequence[str] | None = None,
) -> GenericShardingManager:
    """A sharded source and whole-tensor replicas, each in a process of its own as far as plans can see."""
    tensors = random_tensors(SHAPES)
    train = train_group(tensors, dim0_sharded(SHAPES, parts))
    layouts = [whole_target(SHAPES, rank, dtype) for rank in range(num_replicas)]
    rollout = LocalGroup([RolloutHost(engine([layout])) for layout in layouts])
    return GenericShardingManager(train, rollout, bucket_bytes=512, transports=transports)


def step(manager: GenericShardingManager) -> None:
    for host in manager.train.hosts:  # type: ignore[attr-defined]
        host.engine.optim_step()


@settings(max_examples=120, deadline=None)
@given(st.data(), shapes(), st.integers(8, 300))
def test_every_layout_serves_the_source_bit_for_bit(
    data: st.DataObject, tensors: dict[str, tuple[int, ...]], bucket_bytes: int
) -> None:
    values = random_tensors(tensors)
    train = train_group(values, data.draw(sources(tensors)))
    rollout = rollout_group([[layout] for layout in data.draw(targets(tensors))])
    manager = GenericShardingManager(train, rollout, bucket_bytes=bucket_bytes)
    report = sync(manager, 1)
    for name, box, tensor in served(rollout):
        assert torch.equal(tensor, values[name][box.slices(Box.whole(tensors[name]))].to(tensor.dtype))
    assert (report.version, report.num_tensors, report.changed_tensors) == (1, len(tensors), len(tensors))
    step(manager)
    sync(manager, 2)
    for name, box, tensor in served(rollout):
        assert torch.equal(tensor, (values[name] + 0.125)[box.slices(Box.whole(tensors[name]))].to(tensor.dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_receipt_of_every_replica_is_part_of_the_report(dtype: str) -> None:
    manager = make(dtype=dtype)
    report = sync(manager, 7)
    assert [receipt.version for receipt in report.receipts] == [7, 7]
    assert report.moved_bytes == report.num_bytes
    assert set(report.stages_s) == {"fingerprint", "pull", "verify"}
    assert report.seconds >= sum(report.stages_s.values()) * 0.99


def test_a_replica_of_several_places_is_proven_as_a_whole() -> None:
    tensors = random_tensors(SHAPES)
    places = [replace(layout, process=f"worker:{layout.rank}") for layout in dim0_sharded(SHAPES, 3)]
    both = [replace(p, boxes=(*p.boxes[:-1], ("norm", Box.whole(SHAPES["norm"])))) for p in places]
    train = train_group(tensors, dim0_sharded(SHAPES, 2, replicas=2))
    manager = GenericShardingManager(train, rollout_group([both, both, [whole_target(SHAPES)]]), bucket_bytes=4096)
    report = sync(manager, 1)
    assert report.receipts[0].fingerprints == report.receipts[2].fingerprints


def test_within_one_process_no_byte_is_copied_between_the_engines() -> None:
    tensors = random_tensors(SHAPES)
    seen: list[int] = []

    class Watching(TensorRolloutEngine):
        def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
            def watch() -> Iterator[WeightShard]:
                for shard in shards:
                    seen.append(shard.tensor.data_ptr())
                    yield shard

            return super().update_weights(watch(), version)

    layout = replace(whole_target(SHAPES), process="one")
    train = train_group(tensors, [replace(layout, rank=0)])
    report = sync(GenericShardingManager(train, LocalGroup([RolloutHost(Watching([layout]))])), 1)
    held = [tensor.data_ptr() for _, _, tensor in train.hosts[0].engine.held]
    assert sorted(seen) == sorted(held)
    assert report.moved_bytes == 0
    assert report.num_bytes == sum(t.numel() * 4 for t in tensors.values())


def test_the_layouts_are_asked_for_once_and_the_plan_is_kept() -> None:
    manager = make()
    asked: list[str] = []
    run = manager.rollout.run
    manager.rollout.run = lambda method, *a, **k: asked.append(method) or run(method, *a, **k)  # type: ignore[method-assign]
    plans = {id(manager.plan(manager.ends().source, manager.ends().target)) for _ in range(3)}
    sync(manager, 1)
    assert asked == ["target_layouts"]
    assert len(plans) == 1


def test_an_engine_that_drops_a_tensor_is_caught_by_name() -> None:
    class Dropping(TensorRolloutEngine):
        def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
            kept = {name: t.clone() for name, _, t in self.served if name == "layer.w"}
            receipt = super().update_weights(shards, version)
            for name, _, tensor in self.served:
                if name in kept:
                    tensor.copy_(kept[name])
            return replace(receipt, fingerprints=self.fingerprints())

    with pytest.raises(
        WeightSyncError, match=r"replica 0 of .* does not serve version 1 as it was trained: 'layer.w' of 4"
    ):
        sync(make(engine=Dropping), 1)


def test_an_engine_that_permutes_rows_is_caught_by_name() -> None:
    class Permuting(TensorRolloutEngine):
        def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
            receipt = super().update_weights(shards, version)
            for name, _, tensor in self.served:
                if name == "embed":
                    tensor.copy_(tensor.flip(0))
            return replace(receipt, fingerprints=self.fingerprints())

    with pytest.raises(WeightSyncError, match="'embed' of 4 tensors differ from the source"):
        sync(make(engine=Permuting), 1)


def test_an_engine_that_does_not_account_for_a_tensor_is_caught_by_name() -> None:
    class Silent(TensorRolloutEngine):
        def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
            receipt = super().update_weights(shards, version)
            return replace(receipt, fingerprints={k: v for k, v in receipt.fingerprints.items() if k != "norm"})

    with pytest.raises(WeightSyncError, match="does not account for 'norm' in its receipt of version 1"):
        sync(make(engine=Silent), 1)


def test_an_engine_that_stops_taking_weights_early_is_caught() -> None:
    class Lazy(TensorRolloutEngine):
        def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
            next(iter(shards))
            return SyncReceipt(version=version, num_tensors=1, num_bytes=4, fingerprints={})

    with pytest.raises(WeightSyncError, match=r"took 1 of \d+ pieces of version 1 and stopped at 'embed'"):
        sync(make(engine=Lazy), 1)


def test_an_engine_that_goes_on_serving_the_old_version_is_caught() -> None:
    class Stale(TensorRolloutEngine):
        def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
            return super().update_weights(shards, min(version, 1))

    manager = make(engine=Stale)
    sync(manager, 1)
    step(manager)
    with pytest.raises(WeightSyncError, match="was sent version 2 and says it serves 1"):
        sync(manager, 2)


def test_a_source_that_hands_out_other_weights_than_it_holds_is_caught() -> None:
    class Drifting(TensorTrainEngine):
        """Its second walk over the shards, which is the export, finds other values than its first."""

        walks = 0

        def shards(self) -> Iterator[WeightShard]:
            self.walks += 1
            for shard in super().shards():
                changed = shard.name == "layer.b" and self.walks > 1
                yield replace(shard, tensor=shard.tensor + 1) if changed else shard

    tensors = random_tensors(SHAPES)
    train = LocalGroup([TrainHost(Drifting(tensors, layout)) for layout in dim0_sharded(SHAPES, 1)])
    manager = GenericShardingManager(train, rollout_group([[whole_target(SHAPES)]]))
    with pytest.raises(WeightSyncError, match=r"'layer\.b' of 4 tensors differ"):
        sync(manager, 1)


@pytest.mark.parametrize(("copies", "num_replicas"), [(2, 1), (3, 1), (4, 1), (2, 2), (3, 4)])
def test_copies_of_the_source_that_drifted_apart_are_caught(copies: int, num_replicas: int) -> None:
    """With one replica, each copy was held to the numbers that it gave itself."""
    layouts = dim0_sharded(SHAPES, 2, replicas=copies)
    for stale in range(len(layouts)):
        train = train_group(random_tensors(SHAPES), layouts)
        rollout = rollout_group([[whole_target(SHAPES, rank)] for rank in range(num_replicas)])
        manager = GenericShardingManager(train, rollout)
        sync(manager, 1)
        for rank, host in enumerate(train.hosts):
            if rank != stale:
                host.engine.optim_step()
        with pytest.raises(WeightSyncError, match="differ from the source"):
            sync(manager, 2)


def test_corrupted_bytes_in_shared_memory_are_caught_with_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    post = RingWriter.post

    def corrupting(self: RingWriter, stream: int, checksum: int) -> None:
        self.next_slot(0)[3] ^= 0x40
        post(self, stream, checksum)

    monkeypatch.setattr(RingWriter, "post", corrupting)
    with pytest.raises(
        WeightSyncError, match=r"of 'embed' and .* more tensors did not arrive from source rank 0 .*corrupted"
    ):
        sync(make(), 1)


def test_weights_that_did_not_change_after_a_step_are_refused() -> None:
    manager = make()
    sync(manager, 1)
    with pytest.raises(WeightSyncError, match="no tensor changed between version 1 and version 2"):
        sync(manager, 2)
    step(manager)
    assert sync(manager, 2).changed_tensors == 4


def test_the_same_version_may_be_synced_again_and_a_step_may_be_said_to_change_nothing() -> None:
    manager = make()
    sync(manager, 1)
    assert sync(manager, 1).changed_tensors == 0
    assert sync(manager, 2, expect_change=False).changed_tensors == 0
    with pytest.raises(WeightSyncError, match="no tensor changed"):
        sync(manager, 2, expect_change=True)


def test_only_what_changed_is_counted() -> None:
    manager = make()
    sync(manager, 1)
    for host in manager.train.hosts:  # type: ignore[attr-defined]
        for name, _, tensor in host.engine.held:
            if name == "norm":
                tensor.mul_(2)
    assert sync(manager, 2).changed_tensors == 1


def test_memory_that_cannot_be_attached_is_gone_around_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    export = RingTransport.export

    def hidden(self: Any, *args: Any) -> Sequence[Mapping[str, Any]]:
        asked.append(self.name)
        return [{**handle, "path": "/proc/0/fd/0"} for handle in export(self, *args)]

    monkeypatch.setattr(RingTransport, "export", hidden)
    manager = make(parts=1, num_replicas=1)
    sync(manager, 1)
    assert asked == ["ring"]
    step(manager)
    sync(manager, 2)
    assert asked == ["ring"]
    assert torch.equal(served(manager.rollout)[0][2], random_tensors(SHAPES)["embed"] + 0.125)  # type: ignore[arg-type]


class DeadPeer(LocalPeer):
    """Answers some calls, and then is gone."""

    answers = 1

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        self.answers -= 1
        if self.answers < 0:
            raise ConnectionResetError("the actor died")
        return super().call(method, *args, timeout_s=timeout_s)


def test_a_source_that_dies_between_two_buckets_ends_the_sync_with_its_rank() -> None:
    manager = make(parts=1, num_replicas=1, transports=["object_store"])
    manager.train.peers = lambda: [DeadPeer(host) for host in manager.train.hosts]  # type: ignore[attr-defined,method-assign]
    before = served(manager.rollout)  # type: ignore[arg-type]
    with pytest.raises(
        WeightSyncError, match=r"did not arrive from source rank 0 .*ConnectionResetError: the actor died"
    ):
        sync(manager, 1)
    assert served(manager.rollout) == before  # type: ignore[arg-type]
    assert before[0][2].count_nonzero() == 0


class WatchedPeer(LocalPeer):
    """Counts the calls under way, each of which takes a while."""

    under_way = most = answered = 0

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        time.sleep(0.002)
        answer = super().call(method, *args, timeout_s=timeout_s)
        self.under_way -= 1
        self.answered += 1
        return answer


def test_each_source_is_asked_for_one_bucket_at_a_time_and_at_most_one_ahead() -> None:
    """A source has two blocks per target: a third bucket may not be written while the first is still read."""
    ahead: list[int] = []
    peers: list[WatchedPeer] = []

    class Watching(TensorRolloutEngine):
        def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
            def watch() -> Iterator[WeightShard]:
                for taken, shard in enumerate(shards):
                    time.sleep(0.005)
                    ahead.append(peers[0].answered - rounds_until[taken])
                    yield shard

            return super().update_weights(watch(), version)

    manager = make(parts=1, num_replicas=1, engine=Watching, transports=["object_store"])
    peers += [WatchedPeer(host) for host in manager.train.hosts]  # type: ignore[attr-defined]
    manager.train.peers = lambda: peers  # type: ignore[method-assign]
    ends = manager.ends()
    buckets = manager.plan(ends.source, ends.target).buckets
    assert {bucket.transport for bucket in buckets} == {"object_store"}
    numbers = [bucket.round for bucket in buckets for _ in bucket.transfers]
    rounds_until = [number + 1 for number in numbers]
    sync(manager, 1)
    assert max(numbers) > 5
    assert peers[0].most == 1
    assert set(ahead) == {0, 1}


@pytest.mark.parametrize("parts", [1, 3])
def test_each_source_is_called_once_in_a_sync_however_many_buckets_there_are(parts: int) -> None:
    """It was a call for each bucket; one more, where weights were read in place."""
    manager = make(parts=parts, num_replicas=2)
    hosts: list[TrainHost] = manager.train.hosts  # type: ignore[attr-defined]
    asked: list[int] = []
    for host in hosts:
        host.export_weights = counted(host.export_weights, asked)  # type: ignore[method-assign]

    def hold(shared: bool) -> None:
        for host in hosts:
            held = host.engine.held  # type: ignore[attr-defined]
            moved = share([t for _, _, t in held]) if shared else [t.clone() for _, _, t in held]
            host.engine.held = [(n, b, t) for (n, b, _), t in zip(held, moved, strict=True)]  # type: ignore[attr-defined]

    ends = manager.ends()
    buckets = manager.plan(ends.source, ends.target).buckets
    assert len(buckets) > 4 * parts
    for version, shared in enumerate((False, False, True, True, False), start=1):
        hold(shared)
        asked.clear()
        sync(manager, version)
        assert len(asked) == parts * 2
        assert sum(asked) == len(buckets)
        for name, box, tensor in served(manager.rollout):  # type: ignore[arg-type]
            # Added step by step, as rounding is.
            expected = sum([0.125] * (version - 1), start=random_tensors(SHAPES)[name])
            assert torch.equal(tensor, expected[box.slices(box)])
        step(manager)


def counted(call: Callable[[Sequence[Bucket], str], Any], asked: list[int]) -> Callable[[Sequence[Bucket], str], Any]:
    def export(buckets: Sequence[Bucket], sync: str = "") -> Any:
        asked.append(len(buckets))
        return call(buckets, sync)

    return export


def test_buckets_are_exported_while_sources_take_fingerprints() -> None:
    manager = make(parts=1, num_replicas=1)
    host: TrainHost = manager.train.hosts[0]  # type: ignore[attr-defined]
    pulled = threading.Event()
    pull, prints = manager.pull, host.weight_fingerprints

    def pull_and_tell(*args: Any) -> list[SyncReceipt]:
        receipts = pull(*args)
        pulled.set()
        return receipts

    def wait_for_pull(transfers: Any) -> Mapping[str, int]:
        assert pulled.wait(60)
        return prints(transfers)

    manager.pull = pull_and_tell  # type: ignore[method-assign]
    host.weight_fingerprints = wait_for_pull  # type: ignore[method-assign]
    assert sync(manager, 1).changed_tensors == len(SHAPES)


def test_a_source_that_cannot_say_its_fingerprints_fails_the_sync() -> None:
    manager = make(parts=1, num_replicas=1)
    host: TrainHost = manager.train.hosts[0]  # type: ignore[attr-defined]

    def fail(transfers: Any) -> Mapping[str, int]:
        raise RuntimeError("its device is gone")

    host.weight_fingerprints = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="its device is gone"):
        sync(manager, 1)


def test_replicas_whose_engines_own_checksums_differ_are_caught() -> None:
    """What an engine derives, and no fingerprint covers, may differ although all weights are right."""

    class OwnChecksum(TensorRolloutEngine):
        derived = "alike"

        def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
            return replace(super().update_weights(shards, version), engine_checksum=f"{self.derived} {version}")

    manager = make(num_replicas=3, engine=OwnChecksum)
    assert [receipt.engine_checksum for receipt in sync(manager, 1).receipts] == ["alike 1"] * 3
    manager.rollout.hosts[1].engine.derived = "another"  # type: ignore[attr-defined]
    step(manager)
    with pytest.raises(
        WeightSyncError, match=r"version 2, .* own checksum: replicas \[0, 2\]: alike 2; replicas \[1\]: ano"
    ):
        sync(manager, 2)
