"""Where a worker runs. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """Node, process and logs of a worker."""

    worker_id: str
    node_id: str
    """Ray's identifier of the node."""
    node: str
    """Host name and address of the node."""
    address: str
    pid: int
    logs: tuple[str, ...]
    """Files on that node that hold what the process printed."""
    accelerators: tuple[str, ...] = ()
    """Devices that Ray assigned to it, by their names on that node, which are the same in every process. Empty on a
    CPU."""
