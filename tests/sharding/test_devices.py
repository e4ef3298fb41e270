"""Which ranks are on one GPU, told by its name on the node. Layouts are made up: not run on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from sharding_cases import random_tensors, whole_target

from rlsdk.cluster.devices.placement import PoolSpec
from rlsdk.cluster.devices.rank_contexts import WorkerSettings, rank_contexts
from rlsdk.cluster.devices.worker_info import WorkerInfo
from rlsdk.interfaces import RankContext, WeightLayout
from rlsdk.sharding import GenericShardingManager
from rlsdk.sharding.plan.holders import ELSEWHERE, SAME_DEVICE, SAME_NODE, Places
from rlsdk.sharding.transfer.devices import on_physical_device
from rlsdk.sharding.transports.ring_transport import DeviceRingTransport
from rlsdk.testing.sharding.local_groups import LocalGroup, RolloutHost, TrainHost
from rlsdk.testing.sharding.tensor_engines import TensorRolloutEngine, TensorTrainEngine

SHAPES = {"w": (4, 4)}
SETTINGS = WorkerSettings(timeout_s=1.0, collective_timeout_s=1.0, num_threads=None, seed=0, log_dir=None, preload=())


def contexts(role: str, *places: tuple[str, str], device: str = "cuda", per_rank: int = 1) -> list[RankContext]:
    """Of ranks on these (node, GPU), as the cluster makes them."""
    infos = [
        WorkerInfo(
            worker_id=f"{role}-{at}", node_id=node, node=node, address=node, pid=at, logs=(),
            accelerators=(gpu,) if device == "cuda" else (),
        )
        for at, (node, gpu) in enumerate(places)
    ]  # fmt: skip
    counts = tuple([node for node, _ in places].count(node) for node in dict.fromkeys(node for node, _ in places))
    pool = PoolSpec(name="p", devices_per_node=counts, device=device)
    return rank_contexts(role, pool, infos, devices_per_rank=per_rank, port=0, settings=SETTINGS)


def manager(train: Sequence[RankContext], rollout: Sequence[RankContext]) -> GenericShardingManager:
    """Of engines that know no more of their devices than their contexts say."""
    tensors = random_tensors(SHAPES)

    def layout(ctx: RankContext) -> WeightLayout:
        return whole_target(SHAPES, ctx.rank, process=ctx.role, node=ctx.node, device=ctx.device)

    sources = [TrainHost(TensorTrainEngine(tensors, layout(ctx)), ctx.accelerators) for ctx in train]
    targets = [RolloutHost(TensorRolloutEngine([layout(ctx)]), ctx.accelerators) for ctx in rollout]
    return GenericShardingManager(LocalGroup(sources), LocalGroup(targets))


@pytest.mark.parametrize(
    ("rollout", "shared"),
    [(("a", "0"), True), (("a", "1"), False), (("b", "0"), False), (("a", "GPU-5d2f"), False)],
)
def test_two_processes_share_a_device_where_node_and_physical_name_agree(
    rollout: tuple[str, str], shared: bool
) -> None:
    actor, serving = contexts("actor", ("a", "0")), contexts("rollout", rollout)
    assert actor[0].device == serving[0].device == "cuda:0"
    ends = manager(actor, serving).ends()
    near, far = Places.of(ends.source, ends.target)
    first = np.zeros(1, np.int64)
    expected = SAME_DEVICE if shared else SAME_NODE if rollout[0] == "a" else ELSEWHERE
    assert near.distance(first, far, first).tolist() == [expected]


def test_a_rank_of_several_devices_knows_the_name_of_each() -> None:
    ranks = contexts("rollout", ("a", "4"), ("a", "5"), ("b", "4"), ("b", "7"), per_rank=2)
    assert [(rank.node, rank.local_rank, rank.accelerators) for rank in ranks] == [
        ("a", 0, ("4", "5")),
        ("b", 0, ("4", "7")),
    ]
    second = whole_target(SHAPES, device="cuda:1")
    assert on_physical_device(second, ranks[1].accelerators).device == "cuda:7"


def test_without_a_name_and_on_a_cpu_the_device_stays_as_the_engine_says() -> None:
    assert on_physical_device(whole_target(SHAPES, device="cuda:1"), ()).device == "cuda:1"
    (rank,) = contexts("actor", ("a", ""), device="cpu")
    assert (rank.device, rank.accelerators) == ("cpu", ())
    assert on_physical_device(whole_target(SHAPES, device="cpu"), ("0",)).device == "cpu"
    ends = manager([rank], contexts("rollout", ("a", ""), device="cpu")).ends()
    assert not DeviceRingTransport.reaches(ends.source[0], ends.target[0])
