"""Placement of roles: assigns each role a pool, and each pool its devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rlsdk.cluster import PlacementSpec, PoolSpec, count_gpus, preset_placement
from rlsdk.config import PlacementConfig, Role, RunConfig, with_dtype
from rlsdk.config import roles as declared_roles
from rlsdk.config.sections.role_kinds import ACTOR, base_role
from rlsdk.interfaces import RolloutSpec
from rlsdk.system.processors import usable_processors


def roles(config: RunConfig, device: str, *, needed: Sequence[str] | None = None) -> tuple[Role, ...]:
    """The role table of a run, each role with the name of its pool.

    Args:
        config: the run's configuration.
        device: `cpu` or `cuda`, used if the placement does not name one.
        needed: names of the roles; None: the roles that the algorithm needs.

    Raises:
        ConfigError: the placement has fewer devices than pools.
    """
    table = declared_roles(with_dtype(config, device), needed=needed)
    return placed(table, placement_of(config.placement, [role.name for role in table], device))


def placed(table: Iterable[Role], placement: PlacementSpec) -> tuple[Role, ...]:
    """These roles, each with the name of its pool; `shares_devices` of rollout roles is set by it."""
    return tuple(_placed(role, placement) for role in table)


def _placed(role: Role, placement: PlacementSpec) -> Role:
    pool = placement.roles[role.name]
    spec = role.spec
    if isinstance(spec, RolloutSpec):
        spec = replace(spec, shares_devices=len(placement.roles_of(pool)) > 1)
    return replace(role, pool=pool, spec=spec)


def placement_of(chosen: PlacementConfig, names: Sequence[str], device: str) -> PlacementSpec:
    """Assigns a pool to each of these roles.

    Raises:
        ConfigError: fewer devices than pools.
    """
    cpus = processors_of_device(chosen, device)
    if chosen.preset is not None:
        return preset_placement(
            chosen.preset,
            names,
            num_nodes=chosen.num_nodes,
            devices_per_node=chosen.devices_per_node,
            device=device,
            cpus_per_device=cpus,
            devices=chosen.devices,
        )
    pools = tuple(
        PoolSpec(
            name=name,
            devices_per_node=pool.devices_per_node,
            device=device if pool.device == "auto" else pool.device,
            cpus_per_device=cpus,
        )
        for name, pool in chosen.pools.items()
    )
    return PlacementSpec(pools=pools, roles={name: _pool_of(name, chosen.roles) for name in names})


def processors_of_device(chosen: PlacementConfig, device: str) -> int:
    """Processors of the process of each device (`placement.cpus_per_device`)."""
    if chosen.cpus_per_device != "auto":
        return chosen.cpus_per_device
    gpus = count_gpus() if device == "cuda" and chosen.ray_address is None else 0
    return max(usable_processors() // gpus, 1) if gpus else 1


def _pool_of(name: str, given: Mapping[str, str]) -> str:
    """Pool of a role. A role without a configured pool shares the actor's devices in turns, since it mostly has the
    actor's shape."""
    return given.get(name) or given.get(base_role(name)) or given[ACTOR]


def role_devices(placement: PlacementSpec) -> dict[str, int]:
    """Number of devices of each role."""
    sizes = {pool.name: pool.num_devices for pool in placement.pools}
    return {role: sizes[pool] for role, pool in placement.roles.items()}


def resolve_device(placement: PlacementConfig) -> str:
    """`cpu` or `cuda`: the placement's device, or else that of this machine. Configure it if the machine that starts
    the run differs from those that execute it."""
    if placement.device != "auto":
        return placement.device
    return "cuda" if count_gpus() else "cpu"
