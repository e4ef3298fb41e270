"""Which devices a rank spans: of one node, or whole nodes."""

from __future__ import annotations

import pytest

from rlsdk.cluster.devices.placement import PlacementSpec, PoolSpec
from rlsdk.cluster.devices.rank_contexts import WorkerSettings, leading_devices, rank_contexts
from rlsdk.cluster.devices.worker_info import WorkerInfo
from rlsdk.interfaces import ConfigError
from rlsdk.planning.places import place


def pool(*devices_per_node: int) -> PoolSpec:
    return PoolSpec(name="p", devices_per_node=devices_per_node, device="cuda")


@pytest.mark.parametrize(
    ("nodes", "width", "leads"),
    [
        ((8,), 4, [0, 4]),
        ((8, 8), 8, [0, 8]),
        ((8, 8), 16, [0]),
        ((8, 8, 8, 8), 16, [0, 16]),
        ((4, 2), 2, [0, 2, 4]),
        ((4, 2), 6, [0]),
    ],
)
def test_a_rank_takes_devices_of_one_node_or_whole_nodes(nodes: tuple[int, ...], width: int, leads: list[int]) -> None:
    assert leading_devices(pool(*nodes), "rollout", width) == leads


@pytest.mark.parametrize(
    ("nodes", "width"), [((8, 8), 3), ((8, 8), 12), ((4, 4, 4), 8), ((6, 2), 4), ((2,), 4), ((2,), 0)]
)
def test_a_rank_gets_no_parts_of_two_nodes(nodes: tuple[int, ...], width: int) -> None:
    with pytest.raises(ConfigError, match=f"rollout: {width} devices a rank do not divide the .* nor fill whole nodes"):
        leading_devices(pool(*nodes), "rollout", width)


def test_a_rank_knows_the_node_of_each_of_its_devices() -> None:
    infos = [
        WorkerInfo(
            worker_id=f"p-{at}", node_id=str(at // 2), node=f"host{at // 2}", address=f"10.0.0.{at // 2}", pid=at + 1,
            logs=(), accelerators=(str(at % 2),),
        )
        for at in range(4)
    ]  # fmt: skip
    settings = WorkerSettings(
        timeout_s=1.0, collective_timeout_s=1.0, num_threads=None, seed=0, log_dir=None, preload=()
    )
    (whole,) = rank_contexts("rollout", pool(2, 2), infos, devices_per_rank=4, port=0, settings=settings)
    assert whole.accelerators == ("0", "1", "0", "1")
    assert whole.device_nodes == ("host0", "host0", "host1", "host1")
    assert whole.bundles == (0, 1, 2, 3)


def test_a_plan_puts_a_replica_of_two_nodes_where_a_run_would() -> None:
    """32 devices on 4 nodes, replicas of 16: two of them, each on whole nodes."""
    placement = PlacementSpec(pools=(pool(8, 8, 8, 8),), roles={"actor": "p", "rollout": "p"})
    places = place(
        placement, num_nodes=4, devices_per_node=8, devices_per_rank={"actor": 1, "rollout": 16}, seed=0, timeout_s=1.0
    )
    assert len(places.contexts["actor"]) == 32
    first, second = places.contexts["rollout"]
    assert [len(set(ctx.device_nodes)) for ctx in (first, second)] == [2, 2]
    assert set(first.device_nodes).isdisjoint(second.device_nodes)
    assert first.accelerators == (*map(str, range(8)), *map(str, range(8)))
