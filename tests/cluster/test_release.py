"""What another run is giving back is waited for as long as that takes; what it keeps is refused soon. Starts no Ray."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from rlsdk.cluster import PlacementSpec, PoolSpec
from rlsdk.cluster.devices.capacity import NodeCapacity
from rlsdk.cluster.ray_cluster import nodes
from rlsdk.interfaces import PlacementError

PLACEMENT = PlacementSpec(pools=(PoolSpec(name="wide", devices_per_node=(3,)),), roles={"actor": "wide"})
HELD = {"bundles": {n: {"CPU": 1.0} for n in range(3)}, "bundles_to_node_id": dict.fromkeys(range(3), "node")}


class Slow:
    """A node of three processors that come free after a while, by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, state: str, free_after_s: float) -> None:
        self.now = 0.0
        self.free_after_s = free_after_s
        monkeypatch.setattr(nodes, "node_capacities", self.capacities)
        monkeypatch.setattr(nodes, "find_down", lambda node_ids: [])
        monkeypatch.setattr(nodes.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(nodes.time, "sleep", self.sleep)
        monkeypatch.setattr(ray.util, "placement_group_table", lambda: {"a": {**HELD, "state": state}})

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def capacities(self) -> list[NodeCapacity]:
        free = 3.0 if self.now >= self.free_after_s else 0.0
        return [NodeCapacity(node_id="node", address="a", cpus=free, gpus=0.0, total_cpus=3.0, total_gpus=0.0)]


def test_what_a_removed_group_still_holds_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine took longer than three seconds, and the next run was refused."""
    slow = Slow(monkeypatch, "REMOVED", 20.0)
    assert nodes.choose_nodes(PLACEMENT) == {"wide": ("node",)}
    assert slow.now >= 20.0


@pytest.mark.parametrize(("state", "within_s"), [("CREATED", 4.0), ("PENDING", 4.0), ("REMOVED", 61.0)])
def test_what_is_kept_is_refused(monkeypatch: pytest.MonkeyPatch, state: str, within_s: float) -> None:
    slow: Any = Slow(monkeypatch, state, 1e9)
    with pytest.raises(PlacementError, match="0 of 3"):
        nodes.choose_nodes(PLACEMENT)
    assert slow.now < within_s
