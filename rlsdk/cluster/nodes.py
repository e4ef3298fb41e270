"""Joining a Ray cluster that is there, and asking what its nodes have."""

from __future__ import annotations

import logging

from rlsdk.cluster.capacity import NodeCapacity
from rlsdk.cluster.local import LocalRay, own_signal_handlers
from rlsdk.cluster.placement import PlacementSpec
from rlsdk.interfaces import PlacementError


def connect(address: str | None, placement: PlacementSpec) -> LocalRay | None:
    """Connects this process to Ray; returns the cluster that it started for that, if any.

    Args:
        address: of a running cluster (`auto` finds it); None starts one here. A process that is connected already
            stays so.
        placement: sizes the cluster that is started.

    Raises:
        PlacementError: no cluster answers at `address`, or this machine lacks the devices.
    """
    import ray

    if ray.is_initialized():
        return None
    if address is None:
        return LocalRay(placement)
    try:
        with own_signal_handlers():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise PlacementError(
            f"no Ray cluster answers at placement.ray_address {address!r} ({error}); start one with "
            "`ray start --head`, or leave the address out to run on this machine"
        ) from error
    return None


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
