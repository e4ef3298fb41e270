"""Starting Ray on this machine for one run, or joining a cluster that is there."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from rlsdk.cluster.capacity import NodeCapacity
from rlsdk.cluster.placement import PlacementSpec
from rlsdk.interfaces import PlacementError

_STORE_BYTES = 2 << 30
_STORE_SHARE = 0.3
"""Of the free shared memory."""
_MIN_STORE_BYTES = 80 << 20


def connect(address: str | None, placement: PlacementSpec) -> bool:
    """Connects this process to Ray; True when that started a cluster, which then ends with this process.

    Args:
        address: of a running cluster (`auto` finds it); None starts one here, with as many logical processors as the
            placement asks for. A process that is connected already stays so.

    Raises:
        PlacementError: no cluster answers at `address`.
    """
    import ray

    if ray.is_initialized():
        return False
    if address is None:
        start_local(placement)
        return True
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise PlacementError(
            f"no Ray cluster answers at placement.ray_address {address!r} ({error}); start one with "
            "`ray start --head`, or leave the address out to run on this machine"
        ) from error
    return False


def start_local(placement: PlacementSpec) -> None:
    """Starts the smallest cluster that can host the placement."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        num_cpus=sum(pool.num_devices * pool.cpus_per_device for pool in placement.pools),
        object_store_memory=store_bytes(),
    )


def store_bytes() -> int:
    """Size of the object store: it is taken from shared memory as it fills, and spills to disk beyond."""
    stats = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    free = stats.f_bavail * stats.f_frsize if stats else _STORE_BYTES
    return max(_MIN_STORE_BYTES, min(_STORE_BYTES, int(free * _STORE_SHARE)))


def node_capacities() -> list[NodeCapacity]:
    """Every living node, with what is free on it."""
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            total, left = node["Resources"], free.get(node["NodeID"], {})
            found.append(
                NodeCapacity(
                    node_id=node["NodeID"],
                    address=f"{node['NodeManagerHostname']}/{node['NodeManagerAddress']}",
                    cpus=left.get("CPU", 0.0),
                    gpus=left.get("GPU", 0.0),
                    total_cpus=total.get("CPU", 0.0),
                    total_gpus=total.get("GPU", 0.0),
                )
            )
    return found
