"""Placement of every rank of every role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rlsdk.cluster import PlacementSpec
from rlsdk.cluster.devices.capacity import NodeCapacity, assign_nodes
from rlsdk.cluster.devices.rank_contexts import leading_devices
from rlsdk.interfaces import RankContext


@dataclass(frozen=True, kw_only=True)
class PlannedDevice:
    """A device of a pool, with the process on it."""

    pool: str
    index: int
    """Index in its pool."""
    node: int
    ranks: Mapping[str, int]
    """Role -> its rank on this device; a rank with several devices is on all of them."""

    @property
    def process(self) -> str:
        return f"{self.pool}-{self.index}"


@dataclass(frozen=True, kw_only=True)
class Places:
    """The whole placement."""

    devices: tuple[PlannedDevice, ...]
    contexts: Mapping[str, tuple[RankContext, ...]]
    """Role -> contexts in rank order."""
    processes: Mapping[str, tuple[str, ...]]
    """Role -> process of each rank."""


def place(
    placement: PlacementSpec,
    *,
    num_nodes: int,
    devices_per_node: int,
    devices_per_rank: Mapping[str, int],
    seed: int,
    timeout_s: float,
) -> Places:
    """Assigns every rank a device, assuming that all nodes are free; `devices_per_rank` by role.

    Raises:
        PlacementError: these nodes do not have the devices; shows requested and available.
        ConfigError: devices per rank that do not divide the devices of a node.
    """
    cpus = max(pool.cpus_per_device for pool in placement.pools) * devices_per_node
    uses_gpus = any(pool.device == "cuda" for pool in placement.pools)
    gpus = devices_per_node if uses_gpus else 0
    if uses_gpus:  # pools of CPU processes next to GPU pools are not limited by such a cluster
        cpus += sum(pool.num_devices * pool.cpus_per_device for pool in placement.pools)
    nodes = [
        NodeCapacity(
            node_id=str(at), address=f"node {at}", cpus=cpus, gpus=gpus, total_cpus=cpus, total_gpus=gpus
        )
        for at in range(num_nodes)
    ]  # fmt: skip
    chosen = assign_nodes(placement, nodes)
    contexts: dict[str, tuple[RankContext, ...]] = {}
    processes: dict[str, tuple[str, ...]] = {}
    ranks: dict[tuple[str, int], dict[str, int]] = {}
    names = _device_names(placement, chosen)
    for role in placement.roles:
        pool = placement.pool_of(role)
        width = devices_per_rank[role]
        leads = leading_devices(pool, role, width)
        where = [int(chosen[pool.name][pool.node_of_device[device]]) for device in leads]
        contexts[role] = tuple(
            RankContext(
                role=role,
                rank=rank,
                world_size=len(leads),
                local_rank=where[:rank].count(where[rank]),
                node=f"node {where[rank]}",
                device="cuda:0" if pool.device == "cuda" else "cpu",
                accelerators=names[pool.name][rank * width : (rank + 1) * width],
                num_threads=pool.cpus_per_device,
                seed=seed,
                timeout_s=timeout_s,
                bundles=tuple(range(rank * width, (rank + 1) * width)),
                device_nodes=tuple(
                    f"node {chosen[pool.name][pool.node_of_device[device]]}"
                    for device in range(rank * width, (rank + 1) * width)
                ),
            )
            for rank in range(len(leads))
        )
        processes[role] = tuple(f"{pool.name}-{device}" for device in leads)
        for device in range(pool.num_devices):
            ranks.setdefault((pool.name, device), {})[role] = device // width
    devices = tuple(
        PlannedDevice(
            pool=pool.name,
            index=at,
            node=int(chosen[pool.name][pool.node_of_device[at]]),
            ranks=ranks.get((pool.name, at), {}),
        )
        for pool in placement.pools
        for at in range(pool.num_devices)
    )
    return Places(devices=devices, contexts=contexts, processes=processes)


def _device_names(placement: PlacementSpec, chosen: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Names of each pool's GPUs on their nodes, numbered over all pools, which share none."""
    taken: Counter[str] = Counter()
    names: dict[str, tuple[str, ...]] = {}
    for pool in placement.pools:
        found = []
        for group in pool.node_of_device if pool.device == "cuda" else ():
            node = chosen[pool.name][group]
            found.append(str(taken[node]))
            taken[node] += 1
        names[pool.name] = tuple(found)
    return names
