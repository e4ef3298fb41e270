"""Checks whether a cluster has what a placement asks for, and on which nodes, before anything is created."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlsdk.cluster.devices.placement import PlacementSpec, PoolSpec
from rlsdk.interfaces import PlacementError
from rlsdk.interfaces.spelling import Setting
from rlsdk.system.quantities import counted

_MAX_TRIES = 20_000


@dataclass(frozen=True, kw_only=True)
class NodeCapacity:
    """Resources of one node, and how much of them is free."""

    node_id: str
    address: str
    cpus: float
    """Free processors."""
    gpus: float
    """Free GPUs."""
    total_cpus: float
    total_gpus: float


@dataclass(frozen=True)
class _Demand:
    """Devices of one pool that must be on one node."""

    pool: PoolSpec
    group: int
    """Position in `pool.devices_per_node`."""

    @property
    def cpus(self) -> float:
        return float(self.pool.devices_per_node[self.group] * self.pool.cpus_per_device)

    @property
    def gpus(self) -> float:
        return float(self.pool.devices_per_node[self.group]) if self.pool.device == "cuda" else 0.0


def processors_notice(placement: PlacementSpec, usable: int) -> str | None:
    """Notice if CPU devices have more threads than one machine has processors for, while fewer threads would do.

    Args:
        placement: a placement on one machine.
        usable: its processors.
    """
    pools = [pool for pool in placement.pools if pool.device == "cpu" and pool.cpus_per_device > 1]
    devices = sum(pool.num_devices for pool in pools)
    asked = sum(pool.num_devices * pool.cpus_per_device for pool in pools)
    if asked <= usable:
        return None
    names = ", ".join(repr(pool.name) for pool in pools)
    threads = max(pool.cpus_per_device for pool in pools)
    return (
        f"warning: placement.cpus_per_device {threads}: the {devices} devices of {names} ask for {asked} processors, "
        f"and {usable} can be used here, so they wait for one another. Add "
        f"`{Setting('placement.cpus_per_device', max(usable // devices, 1))}`"
    )


def assign_nodes(placement: PlacementSpec, nodes: Sequence[NodeCapacity]) -> dict[str, tuple[str, ...]]:
    """Chooses a node for every entry of every pool's `devices_per_node`; entries of one pool get different nodes.

    Best fit, largest entries first, with backtracking.

    Returns:
        Pool name -> node id for each entry.

    Raises:
        PlacementError: the cluster lacks the devices; shows requested and available devices, node by node.
    """
    demands = sorted(
        (_Demand(pool, group) for pool in placement.pools for group in range(len(pool.devices_per_node))),
        key=lambda demand: (-demand.gpus, -demand.cpus),
    )
    search = _Search(demands, nodes)
    if not search.place(0):
        raise PlacementError(_refusal(placement, nodes, demands))
    return {
        pool.name: tuple(nodes[search.chosen[pool.name, group]].node_id for group in range(len(pool.devices_per_node)))
        for pool in placement.pools
    }


class _Search:
    """Depth-first search with best fit first. Identical nodes are tried once."""

    def __init__(self, demands: Sequence[_Demand], nodes: Sequence[NodeCapacity]) -> None:
        self.demands = demands
        self.free = [(node.gpus, node.cpus) for node in nodes]
        self.chosen: dict[tuple[str, int], int] = {}
        self.tries = 0

    def place(self, at: int) -> bool:
        if at == len(self.demands):
            return True
        demand = self.demands[at]
        for node in self._candidates(demand):
            self.tries += 1
            if self.tries > _MAX_TRIES:
                return False
            before = self.free[node]
            self.free[node] = (before[0] - demand.gpus, before[1] - demand.cpus)
            self.chosen[demand.pool.name, demand.group] = node
            if self.place(at + 1):
                return True
            del self.chosen[demand.pool.name, demand.group]
            self.free[node] = before
        return False

    def _candidates(self, demand: _Demand) -> Iterator[int]:
        taken = {node for (pool, _), node in self.chosen.items() if pool == demand.pool.name}
        others = {
            node: frozenset(p for (p, _), n in self.chosen.items() if n == node) for node in range(len(self.free))
        }
        fitting = [
            node
            for node, (gpus, cpus) in enumerate(self.free)
            if node not in taken and gpus >= demand.gpus and cpus >= demand.cpus
        ]
        seen = set()
        for node in sorted(fitting, key=lambda node: self.free[node]):
            kind = (self.free[node], others[node])
            if kind not in seen:
                seen.add(kind)
                yield node


def _refusal(placement: PlacementSpec, nodes: Sequence[NodeCapacity], demands: Sequence[_Demand]) -> str:
    """Error text with requested and available devices."""
    asked = [
        (
            pool.name,
            ", ".join(placement.roles_of(pool.name)),
            " + ".join(map(str, pool.devices_per_node)),
            f"{'1 GPU, ' if pool.device == 'cuda' else ''}{pool.cpus_per_device} CPU",
        )
        for pool in placement.pools
    ]
    available = [
        (node.address, f"{node.gpus:g} of {node.total_gpus:g}", f"{node.cpus:g} of {node.total_cpus:g}")
        for node in nodes
    ]
    gpus, cpus = sum(d.gpus for d in demands), sum(d.cpus for d in demands)
    have_gpus, have_cpus = sum(n.gpus for n in nodes), sum(n.cpus for n in nodes)
    return "\n".join(
        [
            f"the placement asks for {counted(gpus, 'GPU')} and {counted(cpus, 'CPU')}, the cluster has "
            f"{counted(have_gpus, 'GPU')} and {counted(have_cpus, 'CPU')} free on {counted(len(nodes), 'node')}: "
            f"{_why(demands, nodes)}",
            "asked:",
            *_table(("pool", "roles", "devices by node", "each device"), asked),
            "available:",
            *_table(("node", "GPUs free", "CPUs free"), available),
            *(
                [f"There is no GPU here: `{Setting('placement.device', 'cpu')}` runs on processors."]
                if gpus and not any(node.total_gpus for node in nodes)
                else []
            ),
            "Ask for fewer devices (placement.devices_per_node, placement.num_nodes, placement.cpus_per_device), let "
            "roles share a pool, or add nodes to the cluster.",
        ]
    )


def _why(demands: Sequence[_Demand], nodes: Sequence[NodeCapacity]) -> str:
    """Text: the first entry that fits on no node even alone, or that the entries do not fit together."""
    for demand in demands:
        if not any(node.gpus >= demand.gpus and node.cpus >= demand.cpus for node in nodes):
            count = demand.pool.devices_per_node[demand.group]
            gpus = f"{counted(demand.gpus, 'GPU')} and " if demand.gpus else ""
            devices = f"{counted(count, 'device')} of pool {demand.pool.name!r}"
            return f"no node has {gpus}{counted(demand.cpus, 'CPU')} free for the {devices}"
        wide = len(demand.pool.devices_per_node)
        if wide > len(nodes):
            return f"pool {demand.pool.name!r} wants {wide} different nodes"
    return "each pool fits alone, but not all of them together"


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (header, *rows)]  # fmt: skip
