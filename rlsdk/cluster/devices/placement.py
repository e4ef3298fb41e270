"""Which devices a run takes, and which role runs on which of them. Plain data: nothing here touches a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlsdk.interfaces import ConfigError, nearest

DEVICES = ("cpu", "cuda")

_TOGETHER = "colocate_"
_ALL = "colocate_all"
PRESETS = (_ALL, "colocate_actor_ref", "colocate_critic_reward", "disaggregated")


@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """A set of devices. One process per device hosts every role of the pool."""

    name: str
    devices_per_node: tuple[int, ...]
    """Devices on each node: `(8, 8)` is sixteen devices on two different nodes. Ranks count in this order."""
    device: str = "cpu"
    """`cpu` (a process with `cpus_per_device` processors) or `cuda` (one GPU besides)."""
    cpus_per_device: int = 1

    def __post_init__(self) -> None:
        if not self.devices_per_node or min(self.devices_per_node) < 1:
            raise ConfigError(
                f"pool {self.name!r}: devices_per_node {self.devices_per_node!r} must hold a positive number per node"
            )
        if self.device not in DEVICES:
            raise ConfigError(f"pool {self.name!r}: device {self.device!r} is not one of {list(DEVICES)}")
        if self.cpus_per_device < 1:
            raise ConfigError(f"pool {self.name!r}: cpus_per_device {self.cpus_per_device!r} must be at least 1")

    @property
    def num_devices(self) -> int:
        return sum(self.devices_per_node)

    @property
    def node_of_device(self) -> tuple[int, ...]:
        """For each device, in rank order, the position of its node in `devices_per_node`."""
        return tuple(node for node, count in enumerate(self.devices_per_node) for _ in range(count))


@dataclass(frozen=True, kw_only=True)
class PlacementSpec:
    """Pools, and the pool that each role runs in. Any set of roles may share a pool."""

    pools: tuple[PoolSpec, ...]
    roles: Mapping[str, str]
    """Role -> name of its pool."""

    def __post_init__(self) -> None:
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ConfigError(f"pool names {names!r} are not distinct")
        for role, pool in self.roles.items():
            if pool not in names:
                raise ConfigError(
                    f"role {role!r} is mapped to pool {pool!r}{nearest(pool, names)}; pools: {sorted(names)}"
                )

    def pool_of(self, role: str) -> PoolSpec:
        """The pool that a role runs in.

        Raises:
            ConfigError: the placement has no such role; names the nearest one.
        """
        if role not in self.roles:
            raise ConfigError(
                f"role {role!r} has no pool{nearest(role, self.roles)}; the placement knows {sorted(self.roles)}"
            )
        return next(pool for pool in self.pools if pool.name == self.roles[role])

    def roles_of(self, pool: str) -> list[str]:
        return sorted(role for role, name in self.roles.items() if name == pool)


def preset_placement(
    preset: str,
    roles: Sequence[str],
    *,
    num_nodes: int = 1,
    devices_per_node: int = 1,
    device: str = "cpu",
    cpus_per_device: int = 1,
    devices: Mapping[str, int] | None = None,
) -> PlacementSpec:
    """Makes a placement from a well-known pattern.

    Args:
        preset: `colocate_all`: one pool, every role on every device, taking turns. `colocate_actor_ref`,
            `colocate_critic_reward`: the two named roles share a pool, every other role has its own.
            `disaggregated`: a pool for each role.
        roles: what the run needs, in the order in which devices are dealt out.
        num_nodes: nodes to spread over.
        devices_per_node: devices that the preset may use on each.
        device: `cpu` or `cuda`.
        cpus_per_device: processors, and threads, of each device's process.
        devices: devices in total for the pool of each of these roles; pools without one share the rest evenly (earlier
            pools get one more where it does not divide).

    Raises:
        ConfigError: an unknown preset, or fewer devices than pools; shows the arithmetic.
    """
    if preset not in PRESETS:
        raise ConfigError(f"placement preset {preset!r} is unknown{nearest(preset, PRESETS)}; presets: {list(PRESETS)}")
    # What follows `colocate_` names the roles that share a pool: `reward` stands for every `reward.NAME`.
    shared = frozenset(preset.removeprefix(_TOGETHER).split("_")) if preset.startswith(_TOGETHER) else frozenset()
    groups = [tuple(roles)] if preset == _ALL else _groups(roles, shared)
    total = num_nodes * devices_per_node
    counts = _deal(preset, groups, total, devices or {})
    pools, start = [], 0
    for group, count in zip(groups, counts, strict=True):
        pools.append(
            PoolSpec(
                name="+".join(group),
                devices_per_node=_per_node(start, start + count, devices_per_node),
                device=device,
                cpus_per_device=cpus_per_device,
            )
        )
        start += count
    return PlacementSpec(pools=tuple(pools), roles={role: "+".join(group) for group in groups for role in group})


def _groups(roles: Sequence[str], shared: frozenset[str]) -> list[tuple[str, ...]]:
    """Roles by pool: those of `shared` together at the place of the first of them, the others alone."""
    together = tuple(role for role in roles if _base(role) in shared)
    groups: list[tuple[str, ...]] = []
    for role in roles:
        group = together if role in together else (role,)
        if group not in groups:
            groups.append(group)
    return groups


def _base(role: str) -> str:
    """`reward` of `reward.helpful`."""
    return role.partition(".")[0]


def _deal(preset: str, groups: Sequence[tuple[str, ...]], total: int, given: Mapping[str, int]) -> list[int]:
    """Devices of each group."""
    wanted = [
        next((given[key] for role in group for key in (role, _base(role)) if key in given), 0) for group in groups
    ]
    open_groups = wanted.count(0)
    rest = total - sum(wanted)
    if rest < open_groups or (not open_groups and rest < 0):
        names = ["+".join(group) for group in groups]
        raise ConfigError(
            f"placement preset {preset!r} makes {len(groups)} pools {names} and needs at least a device for each, but "
            f"{total} devices less {sum(wanted)} given leave {rest} for {open_groups}; raise "
            "placement.devices_per_node, or use 'colocate_all'"
        )
    shares = iter([rest // open_groups + (at < rest % open_groups) for at in range(open_groups)])
    return [count or next(shares) for count in wanted]


def _per_node(start: int, stop: int, devices_per_node: int) -> tuple[int, ...]:
    """Devices `start <= d < stop` of a row of equal nodes, counted by node."""
    first, last = start // devices_per_node, (stop - 1) // devices_per_node
    bounds = [(node * devices_per_node, (node + 1) * devices_per_node) for node in range(first, last + 1)]
    return tuple(min(stop, high) - max(start, low) for low, high in bounds)
