"""Which transport a plan chooses for the process that fetches: replicas beside the trainer and apart from it, of
several sizes, on one node and on two. Layouts are made up: not run on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from sharding_cases import metas_of

from rlsdk.interfaces import Box, Bucket, WeightLayout
from rlsdk.sharding import TRANSPORTS, plan_reshard
from rlsdk.sharding.transports.table import named_transports
from rlsdk.testing.sharding.tensor_engines import tensor_layout

ROWS, GPUS = 64, 8
METAS = metas_of({"w": (ROWS, 4)})


def part(number: int, of: int) -> list[tuple[str, Box]]:
    return [("w", Box((ROWS // of * number, 0), (ROWS // of, 4)))]


def trainer(nodes: Sequence[str], device: str = "cuda") -> list[WeightLayout]:
    """One rank per GPU, as FSDP shards them."""
    places = [(node, gpu) for node in nodes for gpu in range(GPUS)]
    return [
        tensor_layout(
            METAS,
            part(rank, len(places)),
            rank=rank,
            node=node,
            device=device if device == "cpu" else f"{device}:{gpu}",
            process=f"{node}:train {gpu}",
        )
        for rank, (node, gpu) in enumerate(places)
    ]


def replicas(nodes: Sequence[str], tp: int, *, colocated: bool, device: str = "cuda") -> list[WeightLayout]:
    """Replicas of `tp` GPUs. One of several GPUs has a worker process on each, and a process of its own: beside a
    trainer, that of the rank on its first GPU."""
    found = []
    for node in nodes:
        for first in range(0, GPUS, tp):
            host = f"{node}:train {first}" if colocated else f"{node}:rollout {first}"
            for number in range(tp):
                gpu = first + number + (0 if colocated else GPUS)
                layout = tensor_layout(
                    METAS,
                    part(number, tp),
                    rank=len(found),
                    node=node,
                    device=device if device == "cpu" else f"{device}:{gpu}",
                    process=host if tp == 1 else f"{node}:worker {gpu}",
                )
                found.append(layout if tp == 1 else replace(layout, worker=f"{node} {gpu}", host=host))
    return found


def fetching_process(target: WeightLayout, buckets: Sequence[Bucket]) -> str | None:
    """The worker, if one answer of each source describes all that it receives; otherwise its replica's process."""
    kinds = named_transports(list({bucket.transport for bucket in buckets}))
    return target.process if target.worker is None or all(k.reaches_workers() for k in kinds) else target.host


def expected(source: WeightLayout, target: WeightLayout, process: str | None) -> str:
    if source.process == process:
        return "in_process"
    return "device_ring" if source.node == target.node else "process_group"


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("colocated", [True, False])
@pytest.mark.parametrize(
    ("train_nodes", "rollout_nodes"),
    [(["a"], ["a"]), (["a", "b"], ["a", "b"]), (["a"], ["b"])],
    ids=["one node", "two nodes", "a node each"],
)
def test_on_gpus_a_source_is_read_in_place_or_by_the_ring_of_its_node_or_by_a_group_between_nodes(
    train_nodes: list[str], rollout_nodes: list[str], colocated: bool, tp: int
) -> None:
    source, target = trainer(train_nodes), replicas(rollout_nodes, tp, colocated=colocated)
    plan = plan_reshard(source, target, bucket_bytes=256, transports=TRANSPORTS)
    for layout, buckets in zip(target, plan.parts, strict=True):
        process = fetching_process(layout, buckets)
        assert process == layout.process, "no bytes pass through a replica's process"
        for bucket in buckets:
            giver = source[bucket.source]
            assert bucket.transport == expected(giver, layout, process)
            if bucket.transport == "process_group":
                assert giver.node != layout.node, "no communicator within a node"
    assert plan.moved_bytes == plan.lower_bound_bytes


@pytest.mark.parametrize("tp", [2, 8])
def test_what_a_replicas_process_fetches_for_its_workers_it_reads_in_place_where_it_holds_it(tp: int) -> None:
    """Here the object store, which workers cannot use, brings what comes from the other node."""
    source = trainer(["a", "b"], "cpu")
    whole = (("w", Box.whole((ROWS, 4))),)
    target = [replace(layout, boxes=whole) for layout in replicas(["a"], tp, colocated=True, device="cpu")]
    plan = plan_reshard(source, target, bucket_bytes=256, transports=TRANSPORTS)
    for layout, buckets in zip(target, plan.parts, strict=True):
        assert fetching_process(layout, buckets) == layout.host
        for bucket in buckets:
            here = source[bucket.source].process == layout.host
            near = source[bucket.source].node == layout.node
            assert bucket.transport == ("in_process" if here else "ring" if near else "object_store")
        assert {bucket.transport for bucket in buckets} == {"in_process", "ring", "object_store"}


def test_a_replicas_process_that_a_layout_does_not_name_is_never_taken_for_the_source() -> None:
    source = trainer(["a", "b"], "cpu")
    whole = (("w", Box.whole((ROWS, 4))),)
    target = [replace(layout, host=None, boxes=whole) for layout in replicas(["a"], 8, colocated=True, device="cpu")]
    plan = plan_reshard(source, target, bucket_bytes=256, transports=TRANSPORTS)
    assert {bucket.transport for bucket in plan.buckets} == {"ring", "object_store"}


def test_on_a_cpu_a_node_has_one_ring_and_nodes_have_the_object_store() -> None:
    source = trainer(["a"], "cpu")
    for nodes, name in ((["a"], "ring"), (["b"], "object_store")):
        target = replicas(nodes, 1, colocated=False, device="cpu")
        plan = plan_reshard(source, target, bucket_bytes=256, transports=TRANSPORTS)
        assert {bucket.transport for bucket in plan.buckets} == {name}
