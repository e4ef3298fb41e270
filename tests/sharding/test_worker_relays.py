"""Workers that take their own parts, in chains of replicas: each byte goes to a node once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from sharding_cases import dim0_sharded, metas_of, random_tensors, split_box, train_group
from worker_engines import WorkersEngine

from rlsdk.interfaces import Box, Bucket, Delivery, SyncReceipt, WeightLayout, WeightSyncError
from rlsdk.sharding import TRANSPORTS, GenericShardingManager, plan_reshard
from rlsdk.testing.sharding.local_groups import LocalGroup, LocalPeer, RolloutHost
from rlsdk.testing.sharding.tensor_engines import tensor_layout

SHAPES = {"q": (96, 16), "o": (16, 96), "norm": (16,)}
TP = 2
CUT = {"q": 0, "o": 1}
HELD_BYTES = 4 * (2 * 96 * 16 // TP + 16)
"""By each worker."""


def workers_of(node: str, first: int = 0) -> list[WeightLayout]:
    """A replica of two workers: matrices in halves, the norm on both."""
    layouts = []
    for rank in range(TP):
        boxes = [
            (name, split_box(shape, CUT[name], [shape[CUT[name]] // 2])[rank] if name in CUT else Box.whole(shape))
            for name, shape in SHAPES.items()
        ]
        layout = tensor_layout(metas_of(SHAPES), boxes, rank=rank, node=node, process=f"{node}:{first}:{rank}")
        layouts.append(replace(layout, worker=f"tp{rank}"))
    return layouts


class Groups:
    """Sources on a node of their own, and replicas of worker processes; counts what sources send."""

    def __init__(self, nodes: Sequence[str], sources: int = 2) -> None:
        self.engines = [WorkersEngine(workers_of(node, at)) for at, node in enumerate(nodes)]
        self.train = train_group(random_tensors(SHAPES), dim0_sharded(SHAPES, sources))
        self.rollout = LocalGroup([RolloutHost(engine) for engine in self.engines])
        self.sent = dict.fromkeys(range(sources), 0)
        for rank, host in enumerate(self.train.hosts):

            def export(buckets: Sequence[Bucket], sync: str, host: object = host, rank: int = rank) -> object:
                self.sent[rank] += sum(bucket.num_bytes for bucket in buckets)
                return host.source.export(buckets, sync)  # type: ignore[attr-defined]

            host.export_weights = export
        for group in (self.train, self.rollout):
            group.peers = lambda group=group: [LocalPeer(h, is_local=False) for h in group.hosts]  # type: ignore[method-assign,misc]

    def manager(self, *transports: str, timeout_s: float = 30.0) -> GenericShardingManager:
        return GenericShardingManager(
            self.train, self.rollout, bucket_bytes=1024, timeout_s=timeout_s, transports=transports
        )

    def close(self) -> None:
        for host in self.rollout.hosts:
            host.target.close()
        for engine in self.engines:
            engine.close()


@pytest.fixture
def three() -> Iterator[Groups]:
    groups = Groups(["far", "far", "far"])
    yield groups
    groups.close()


def test_workers_of_a_name_form_chains_and_those_of_one_replica_never_do() -> None:
    targets = [layout for at, node in enumerate(["a", "a", "b", "a"]) for layout in workers_of(node, at)]
    found = plan_reshard(dim0_sharded(SHAPES, 8), targets, bucket_bytes=1024, transports=TRANSPORTS)
    assert found.relays == {2: 0, 3: 1, 6: 2, 7: 3}
    assert sum(found.relayed_load.values()) == 2 * TP * HELD_BYTES
    assert sum(found.source_load.values()) == 4 * TP * HELD_BYTES
    copies = [replace(layout, worker=f"dp{at}", process=f"p{at}") for at, layout in enumerate(targets[:1] * 3)]
    assert plan_reshard(dim0_sharded(SHAPES, 2), copies, bucket_bytes=1024, transports=TRANSPORTS).relays == {}


@pytest.mark.parametrize("transport", ["process_group", "object_store"])
def test_two_workers_of_three_replicas_take_each_byte_from_the_sources_once(three: Groups, transport: str) -> None:
    # Between replicas on one node the first that reaches is taken, as between replicas without workers.
    manager = three.manager("ring", transport)
    for version in range(2):
        three.sent = dict.fromkeys(three.sent, 0)
        report = manager.sync(version)
        plan = manager.plan(manager.ends().source, manager.ends().target)
        assert three.sent == plan.relayed_load
        assert sum(three.sent.values()) == TP * HELD_BYTES  # It was three times that.
        for receipt in report.receipts:
            assert [(part.worker, part.num_bytes) for part in receipt.workers] == [
                (f"tp{rank}", HELD_BYTES) for rank in range(TP)
            ]
        three.train.run("optim_step")


def test_workers_on_two_nodes_take_a_byte_once_on_each() -> None:
    groups = Groups(["a", "b", "a", "b"], sources=4)
    try:
        groups.manager("ring", "object_store").sync(1)
        assert sum(groups.sent.values()) == 2 * TP * HELD_BYTES
    finally:
        groups.close()


def test_a_replica_that_breaks_off_takes_the_chain_along_and_the_next_sync_is_whole(three: Groups) -> None:
    middle = three.engines[1]
    receive = middle.receive_weights

    def fails(deliveries: object, version: int) -> object:
        raise OSError("a worker is gone")

    middle.receive_weights = fails  # type: ignore[method-assign,assignment]
    manager = three.manager("ring", "object_store", timeout_s=5.0)
    with pytest.raises((OSError, WeightSyncError)):
        manager.sync(1)
    middle.receive_weights = receive  # type: ignore[method-assign]
    report = manager.sync(1)
    assert torch.tensor([receipt.version for receipt in report.receipts]).eq(1).all()


def over_two_nodes(near: str, far: str, first: int) -> list[WeightLayout]:
    """A replica as `workers_of`, whose second worker is on another node than its process."""
    one, other = workers_of(near, first)
    return [one, replace(other, node=far, process=f"{far}:{first}", is_apart=True)]


def test_workers_on_another_node_than_their_replicas_process_are_in_no_chain() -> None:
    """What is passed on goes through that process: it would cross between nodes twice more."""
    targets = [layout for at in range(3) for layout in over_two_nodes("a", "b", at)]
    found = plan_reshard(dim0_sharded(SHAPES, 8), targets, bucket_bytes=1024, transports=TRANSPORTS)
    assert found.relays == {2: 0, 4: 2}
    assert found.moved_bytes == found.lower_bound_bytes == 3 * TP * HELD_BYTES


def test_what_cannot_reach_a_worker_on_another_node_goes_there_by_its_replicas_process() -> None:
    """No memory is shared with it: a process group of the two."""
    groups = Groups(["near"])
    groups.rollout.hosts[0].engine._layouts = over_two_nodes("near", "far", 0)
    names = [layout.worker for layout in groups.engines[0].layout()]
    seen: list[tuple[str, set[str]]] = []
    receive = groups.engines[0].receive_weights

    def watched(deliveries: Sequence[Delivery], version: int) -> SyncReceipt:
        seen.extend((d.worker, {bucket[2] for bucket in d.parcel["buckets"]}) for d in deliveries)
        return receive(deliveries, version)

    groups.engines[0].receive_weights = watched  # type: ignore[method-assign]
    manager = groups.manager("object_store")
    try:
        for version in range(2):
            receipt = manager.sync(version).receipts[0]
            assert [part.num_bytes for part in receipt.workers] == [HELD_BYTES] * TP
            groups.train.run("optim_step")
        assert seen == [(names[0], {"ring"}), (names[1], {"process_group"})] * 2
    finally:
        groups.close()
