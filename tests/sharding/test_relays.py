"""Replicas that pass weights on to replicas: what each source sends, and that all of them serve what was trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sharding_cases import dim0_sharded, random_tensors, rollout_group, train_group, whole_target

from rlsdk.interfaces import Bucket, Relay, WeightLayout, WeightSyncError
from rlsdk.kit.ranks.object_store import use_store
from rlsdk.sharding import TRANSPORTS, GenericShardingManager, plan_reshard
from rlsdk.sharding.transfer.relay_source import RelaySource
from rlsdk.testing.sharding.local_groups import LocalGroup, LocalPeer

SHAPES = {"embed": (400, 8), "layer.w": (160, 24), "layer.b": (24,), "norm": (8,)}
MODEL_BYTES = 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())


def replicas(nodes: Sequence[str], **more: Any) -> list[WeightLayout]:
    return [replace(whole_target(SHAPES, rank, **more), node=node) for rank, node in enumerate(nodes)]


def plan(sources: int, nodes: Sequence[str]) -> Any:
    return plan_reshard(dim0_sharded(SHAPES, sources), replicas(nodes), bucket_bytes=4096, transports=TRANSPORTS)


def test_on_each_node_one_replica_takes_from_the_sources() -> None:
    found = plan(8, ["a", "b", "a", "b", "a"])
    assert found.relays == {2: 0, 4: 2, 3: 1}
    assert sum(found.source_load.values()) == 5 * MODEL_BYTES
    assert sum(found.relayed_load.values()) == 2 * MODEL_BYTES


def test_where_sources_are_few_the_nodes_form_a_chain_as_well() -> None:
    found = plan(1, ["a", "b", "a", "c"])
    assert found.relays == {2: 0, 1: 0, 3: 1}
    assert found.relayed_load == {0: MODEL_BYTES}
    direct = replace(found, relays={})
    assert direct.source_load == {0: 4 * MODEL_BYTES}


def test_beside_a_source_nothing_is_passed_on() -> None:
    assert plan(2, ["localhost", "localhost"]).relays == {}


def test_workers_and_replicas_that_want_something_else_are_in_no_chain() -> None:
    alike = replicas(["a"] * 5)
    targets = [
        alike[0],
        replace(alike[1], worker="w"),
        replace(alike[2], boxes=alike[2].boxes[::-1]),
        replace(alike[3], process=alike[4].process),
        alike[4],
    ]
    assert plan_reshard(dim0_sharded(SHAPES, 2), targets, bucket_bytes=4096, transports=TRANSPORTS).relays == {}


def test_the_predicted_time_is_that_of_the_busiest_link_and_a_bucket_for_each_stage() -> None:
    whole, bucket = MODEL_BYTES / 50e9, 4096
    # One source, three nodes: a chain, each of whose links carries the model once.
    assert plan(1, ["a", "b", "c"]).predicted_s == pytest.approx(whole + 2 * bucket / 50e9)
    # It would send it three times.
    assert plan(1, ["a"]).predicted_s == pytest.approx(whole)
    # Within a node the next one's link is eight times as fast.
    assert plan(1, ["a", "a"]).predicted_s == pytest.approx(whole + bucket / 400e9)


class Store:
    """An object store of this process, which knows what was put into it by whom."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def put(self, data: NDArray[np.uint8]) -> Any:
        self.num_bytes += len(data)
        return data

    def get(self, handle: Any, timeout_s: float) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = handle
        found.flags.writeable = False
        return found


def far_groups(nodes: Sequence[str], sources: int = 2) -> tuple[LocalGroup, LocalGroup, Mapping[int, list[int]]]:
    """Groups none of whose ranks can see each other's memory; and by source the bytes that it handed out."""
    train = train_group(random_tensors(SHAPES), dim0_sharded(SHAPES, sources))
    rollout = rollout_group([[layout] for layout in replicas(nodes)])
    sent: dict[int, list[int]] = {rank: [] for rank in range(sources)}
    for rank, host in enumerate(train.hosts):

        def export(buckets: Sequence[Bucket], sync: str, host: Any = host, mine: list[int] = sent[rank]) -> Any:
            mine.append(sum(bucket.num_bytes for bucket in buckets))
            return host.source.export(buckets, sync)

        host.export_weights = export
    for group in (train, rollout):
        group.peers = lambda group=group: [LocalPeer(host, is_local=False) for host in group.hosts]  # type: ignore[method-assign,misc]
    return train, rollout, sent


@pytest.mark.parametrize("transport", ["object_store", "process_group"])
def test_three_replicas_of_a_node_take_each_byte_from_the_sources_once(transport: str) -> None:
    use_store(Store())
    try:
        train, rollout, sent = far_groups(["far", "far", "far"])
        manager = GenericShardingManager(train, rollout, bucket_bytes=2048, timeout_s=60.0, transports=[transport])
        for version in range(3):
            for mine in sent.values():
                mine.clear()
            report = manager.sync(version)
            for host in rollout.hosts:
                for name, _, tensor in host.engine.served:
                    expected = sum([0.125] * version, start=random_tensors(SHAPES)[name])
                    assert torch.equal(tensor, expected)
            assert sum(map(sum, sent.values())) == MODEL_BYTES  # It was three times that.
            assert report.num_bytes == 3 * MODEL_BYTES
            train.run("optim_step")
        for host in rollout.hosts:
            host.target.close()
    finally:
        use_store(None)


def test_of_four_replicas_on_two_nodes_each_node_takes_a_byte_once() -> None:
    train, rollout, sent = far_groups(["a", "b", "a", "b"], sources=4)
    manager = GenericShardingManager(train, rollout, bucket_bytes=2048, timeout_s=60.0, transports=["process_group"])
    manager.sync(1)
    assert sum(map(sum, sent.values())) == 2 * MODEL_BYTES
    for host in rollout.hosts:
        assert all(torch.equal(tensor, random_tensors(SHAPES)[name]) for name, _, tensor in host.engine.served)
        host.target.close()


def test_a_replica_that_breaks_off_takes_the_rest_of_its_chain_along_and_the_next_sync_is_whole() -> None:
    train, rollout, _ = far_groups(["far", "far", "far"])
    first = rollout.hosts[0].engine
    update = first.update_weights

    def fails(shards: Any, version: int) -> Any:
        next(iter(shards))
        raise OSError("its memory is full")

    first.update_weights = fails
    manager = GenericShardingManager(train, rollout, bucket_bytes=2048, timeout_s=20.0, transports=["object_store"])
    with pytest.raises(OSError, match="its memory is full"):
        manager.sync(1)
    assert all(tensor.count_nonzero() == 0 for host in rollout.hosts for _, _, tensor in host.engine.served)
    first.update_weights = update
    manager.sync(1)
    for host in rollout.hosts:
        assert all(torch.equal(tensor, random_tensors(SHAPES)[name]) for name, _, tensor in host.engine.served)


def test_other_replicas_under_the_same_indices_get_ways_of_their_own() -> None:
    """As when one of them was lost and another came in its place: the first stays, and is called by a new manager."""
    train, rollout, sent = far_groups(["far", "far"])
    for version in range(2):
        manager = GenericShardingManager(
            train, rollout, bucket_bytes=2048, timeout_s=20.0, transports=["process_group"]
        )
        for mine in sent.values():
            mine.clear()
        manager.sync(version)
        assert sum(map(sum, sent.values())) == MODEL_BYTES
        last = rollout.hosts[1]
        assert all(torch.equal(t, random_tensors(SHAPES)[name]) for name, _, t in last.engine.served)
        last.target.close()
        rollout.hosts[1] = type(last)(type(last.engine)(last.engine.layout()))
        # As the trainer does, when replicas change.
        for host in train.hosts:
            host.source.close()
    for host in rollout.hosts:
        host.target.close()


def test_who_asks_behind_a_sync_that_broke_off_waits_for_nothing() -> None:
    passing = RelaySource()
    relay = Relay(target=0, manager="m", sync="m-0", children=(1,))
    bucket = Bucket(source=2, target=1, transport="object_store", transfers=(), num_bytes=0, round=0)
    passing.begin({1: [[]]}, relay, 60.0, "cpu")
    passing.fail("m-0", "its memory is full")
    with pytest.raises(WeightSyncError, match="its memory is full"):
        passing.export([bucket], "m-0", 60.0)
    with pytest.raises(WeightSyncError, match="target 1 asked for weights that are not passed on"):
        passing.export([bucket], "m-1", 0.1)  # of the next sync, which has not begun: that is waited for


def test_a_replica_that_nobody_passes_weights_on_to_is_told_so() -> None:
    _, rollout, _ = far_groups(["far"])
    bucket = Bucket(source=5, target=3, transport="object_store", transfers=(), num_bytes=0, round=0)
    with pytest.raises(WeightSyncError, match="target 3 asked for weights that are not passed on to it"):
        rollout.hosts[0].pass_on_weights([bucket], "m-0", 0.1)
