"""The position of each rank of a group. Pure functions of where the workers run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from rlsdk.cluster.devices.placement import PoolSpec
from rlsdk.cluster.devices.worker_info import WorkerInfo
from rlsdk.interfaces import ConfigError, RankContext


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Settings shared by all workers of a run."""

    timeout_s: float
    """Deadline of every wait that gives none of its own."""
    collective_timeout_s: float
    """Deadline of every collective between ranks."""
    num_threads: int | None
    """CPU threads of a worker; None: its pool's `cpus_per_device`."""
    seed: int
    log_dir: str | None
    """Absolute."""
    preload: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that every worker gets, besides those of its node."""
    network_interface: str | None = None
    """Network interface of every rendezvous; None: that of the address by which Ray knows a node."""

    def threads(self, pool: PoolSpec) -> int:
        return self.num_threads or pool.cpus_per_device


def leading_devices(pool: PoolSpec, role: str, devices_per_rank: int) -> list[int]:
    """First device of every rank, where a rank takes `devices_per_rank` neighbours: of one node, or whole nodes.

    Raises:
        ConfigError: a rank would get a part of one node and a part of another.
    """
    leads = list(range(0, pool.num_devices, devices_per_rank)) if devices_per_rank > 0 else [0]
    for lead in leads:
        nodes = set(pool.node_of_device[lead : lead + devices_per_rank])
        held = sum(pool.devices_per_node[node] for node in nodes)
        if lead + devices_per_rank > pool.num_devices or not nodes or (len(nodes) > 1 and held != devices_per_rank):
            counts = " + ".join(map(str, pool.devices_per_node))
            raise ConfigError(
                f"{role}: {devices_per_rank} devices a rank do not divide the {counts} devices that pool "
                f"{pool.name!r} has by node (devices_per_node {pool.devices_per_node}), nor fill whole nodes"
            )
    return leads


def rendezvous_address(infos: Sequence[WorkerInfo]) -> str:
    """Address on which rank 0 listens: reachable by every rank, and if possible by no other machine."""
    return "127.0.0.1" if len({info.node_id for info in infos}) == 1 else infos[0].address


def rank_contexts(
    role: str,
    pool: PoolSpec,
    infos: Sequence[WorkerInfo],
    *,
    devices_per_rank: int,
    port: int,
    settings: WorkerSettings,
) -> list[RankContext]:
    """Makes one context per rank; `infos` are the workers of all devices, in order, and rank 0's worker holds
    `port`."""
    leads = infos[::devices_per_rank]
    numbers: defaultdict[str, count[int]] = defaultdict(count)
    local_ranks = [next(numbers[info.node_id]) for info in leads]
    return [
        RankContext(
            role=role,
            rank=rank,
            world_size=len(leads),
            local_rank=local_ranks[rank],
            node=info.node,
            device="cuda:0" if pool.device == "cuda" else "cpu",
            accelerators=tuple(
                name
                for worker in infos[rank * devices_per_rank : (rank + 1) * devices_per_rank]
                for name in worker.accelerators
            ),
            master_addr=rendezvous_address(leads),
            master_port=port,
            num_threads=settings.threads(pool),
            seed=settings.seed,
            timeout_s=settings.collective_timeout_s,
            bundles=tuple(range(rank * devices_per_rank, (rank + 1) * devices_per_rank)),
            device_nodes=tuple(
                worker.node for worker in infos[rank * devices_per_rank : (rank + 1) * devices_per_rank]
            ),
        )
        for rank, info in enumerate(leads)
    ]
