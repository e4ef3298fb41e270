"""Point to point by torch.distributed, between real processes."""

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from sharding_cases import export, random_tensors, rollout_group, whole_target
from sharding_processes import cable_to, train_processes

from rlsdk.interfaces import Box, ConfigError, WeightShard, WeightSyncError
from rlsdk.sharding import GenericShardingManager, WeightSource, WeightTarget, plan_reshard
from rlsdk.sharding.transfer.fetching import OpenTransports
from rlsdk.sharding.transports.process_group import ProcessGroupTransport
from rlsdk.testing.sharding.tensor_engines import TensorRolloutEngine, TensorTrainEngine

SHAPES = {"embed": (1000, 64), "layer.w": (300, 200), "norm": (64,)}


def test_two_processes_send_their_shards_bit_for_bit_again_and_again() -> None:
    values = random_tensors(SHAPES)
    with train_processes(SHAPES, 2) as train:
        rollout = rollout_group([[whole_target(SHAPES, dtype="bfloat16")]])
        manager = GenericShardingManager(train, rollout, bucket_bytes=30_000, transports=["process_group"])
        plan = manager.plan(manager.ends().source, manager.ends().target)
        assert {bucket.transport for bucket in plan.buckets} == {"process_group"}
        for version in range(3):
            manager.sync_weights(plan, version)
            for name, box, tensor in rollout.hosts[0].engine.served:
                assert torch.equal(tensor, values[name][box.slices(Box.whole(SHAPES[name]))].to(tensor.dtype))
            train.run("optim_step")
            values = {name: tensor + 0.125 for name, tensor in values.items()}
        assert not torch.distributed.is_initialized()
        rollout.hosts[0].target.close()


def test_a_source_that_is_killed_ends_the_sync_soon() -> None:
    with train_processes(SHAPES, 1, fatal=2, end="kill") as train:
        rollout = rollout_group([[whole_target(SHAPES)]])
        manager = GenericShardingManager(
            train, rollout, bucket_bytes=60_000, transports=["process_group"], timeout_s=5.0
        )
        plan = manager.plan(manager.ends().source, manager.ends().target)
        start = time.monotonic()
        with pytest.raises(WeightSyncError, match="did not arrive from source rank 0 by process_group"):
            manager.sync_weights(plan, 1)
        assert time.monotonic() - start < 20
        rollout.hosts[0].target.close()


def test_a_source_that_never_sends_is_an_error_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessGroupTransport, "_send", lambda self, pair, buckets, device, before: None)
    source, target = ProcessGroupTransport(), ProcessGroupTransport()
    target.timeout_s = 1.0
    handle = export(source, [WeightShard(name="w", box=Box.whole((4,)), tensor=torch.ones(4))], ["float32"])
    start = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"did not send 64 bytes in 1 s"):
        target.fetch(handle, [((4,), "float32")])
    assert time.monotonic() - start < 30
    source.close()


def test_ends_of_different_wire_versions_refuse_each_other() -> None:
    with pytest.raises(WeightSyncError, match="speaks version 0 of the wire, this end version 4"):
        ProcessGroupTransport().fetch({"wire_version": 0}, [])


def test_a_transport_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"transport 'rinq' does not exist; did you mean 'ring'\?"):
        GenericShardingManager(rollout_group([]), rollout_group([]), transports=["rinq"])


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 to make a host")
def test_two_hosts_send_by_the_addresses_that_reach_each_other() -> None:
    """The source lives in a network of its own, whose only way out is a cable to here."""
    values = random_tensors(SHAPES)
    with train_processes(SHAPES, 1, own_network=True) as train, cable_to(train.pids[0]):
        rollout = rollout_group([[whole_target(SHAPES)]])
        manager = GenericShardingManager(train, rollout, bucket_bytes=100_000, transports=["process_group"])
        plan = manager.plan(manager.ends().source, manager.ends().target)
        for version in range(2):
            manager.sync_weights(plan, version, expect_change=False)
            for name, _, tensor in rollout.hosts[0].engine.served:
                assert torch.equal(tensor, values[name])
        rollout.hosts[0].target.close()


def test_a_target_goes_over_to_a_source_that_was_made_anew() -> None:
    """It waited on the group of the source before, whose process may be gone."""
    target = ProcessGroupTransport()
    target.timeout_s = 10.0
    for value in (1.0, 2.0):
        source = ProcessGroupTransport()
        shard = WeightShard(name="w", box=Box.whole((4,)), tensor=torch.full((4,), value))
        (came,) = target.fetch(export(source, [shard], ["float32"]), [((4,), "float32")])
        assert came.unique().tolist() == [value]
        source.close()
    target.close()


def test_what_was_asked_for_and_never_fetched_is_not_taken_for_what_is_asked_for_next() -> None:
    """Every later sync served the weights of the one before."""
    target = WeightTarget(TensorRolloutEngine([whole_target(SHAPES, process="target")]))
    held = TensorTrainEngine(random_tensors(SHAPES), whole_target(SHAPES, process="source"))
    source, transports = WeightSource(held), OpenTransports()
    plan = plan_reshard(
        [source.layout()], list(target.layouts()), bucket_bytes=1 << 20, transports=[ProcessGroupTransport]
    )
    source.hold(keep=3)
    source.export(plan.buckets, "broken off")
    for step in range(3):
        held.optim_step()
        source.hold(keep=3)
        handles = source.export(plan.buckets, f"{step}")
        for bucket, handle in zip(plan.buckets, handles, strict=True):
            for shard in transports.fetch(bucket, handle, 20.0):
                assert torch.equal(shard.tensor, next(t for name, _, t in held.held if name == shard.name))
    transports.close()
    source.close()


def test_a_source_that_no_address_leads_to_is_said_to_be_so() -> None:
    source, target = ProcessGroupTransport(), ProcessGroupTransport()
    handle = export(source, [WeightShard(name="w", box=Box.whole((4,)), tensor=torch.ones(4))], ["float32"])
    with pytest.raises(WeightSyncError, match=r"no address of the source can be reached from here \(127\.0\.0\.1:1: "):
        target.fetch({**handle, "hosts": ["127.0.0.1"], "port": 1}, [((4,), "float32")])
    source.close()


def test_many_pairs_open_their_groups_one_at_a_time_and_wait_in_no_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes' worth of ends, all sources and targets of each other, begun in different orders at once."""
    opening, most = [0, 0], [0, 0]
    meet = ProcessGroupTransport._meet

    def watched(self: ProcessGroupTransport, pair: Any, rank: int, *args: Any) -> Any:
        opening[rank] += 1
        most[rank] = max(most[rank], opening[rank])
        time.sleep(0.02)
        try:
            return meet(self, pair, rank, *args)
        finally:
            opening[rank] -= 1

    monkeypatch.setattr(ProcessGroupTransport, "_meet", watched)
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    sources = {pair: ProcessGroupTransport() for pair in pairs}
    targets = {pair: ProcessGroupTransport() for pair in pairs}
    shards = {
        (a, b): WeightShard(name="w", box=Box.whole((4,)), tensor=torch.full((4,), 10.0 * a + b)) for a, b in pairs
    }

    def pull(pair: tuple[int, int]) -> torch.Tensor:
        handle = export(sources[pair], [shards[pair]], ["float32"])
        return next(iter(targets[pair].fetch(handle, [((4,), "float32")]))).clone()

    with ThreadPoolExecutor(len(pairs)) as pool:
        for pair, found in zip(pairs, pool.map(pull, pairs, timeout=60), strict=True):
            assert torch.equal(found, shards[pair].tensor)
    assert most == [1, 1]
    for end in (*sources.values(), *targets.values()):
        end.close()
