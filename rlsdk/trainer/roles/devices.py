"""The devices of a run and a process on each. Imports no torch: Ray starts while the rest is imported."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlsdk.cluster import Cluster, PlacementSpec, processors_notice
from rlsdk.config import Role, RunConfig
from rlsdk.interfaces import BackendKind
from rlsdk.system.processors import usable_processors

if TYPE_CHECKING:
    from rlsdk.registry import Registry

_log = logging.getLogger(__name__)

PRELOAD = ("transformers.modeling_utils",)
"""The slowest import of nearly every engine: workers start it before they know their role."""
HOSTS = {
    BackendKind.TRAIN: "rlsdk.trainer.roles.hosts:TrainHost",
    BackendKind.ROLLOUT: "rlsdk.trainer.roles.hosts:RolloutHost",
}
"""Class that hosts an engine in its worker, by kind of backend."""


def start_cluster(
    table: Sequence[Role],
    registry: Registry,
    config: RunConfig,
    pools: PlacementSpec,
    *,
    run_dir: Path,
    before_connect: Callable[[], None] = lambda: None,
) -> Cluster:
    """Reserves the devices that the roles need, or raises an error that says what is missing. Use as a context manager.
    `before_connect`: see `Cluster.start`."""
    specs = {role.name: registry.backend(role.kind, role.backend) for role in table}
    isolated = {name: registry.isolation(spec) for name, spec in specs.items()}
    placement = config.placement
    if placement.ray_address is None and (notice := processors_notice(pools, usable_processors())):
        _log.warning(notice)
    engines = dict.fromkeys(spec.engine.partition(":")[0] for spec in specs.values())
    return Cluster.start(
        pools,
        address=placement.ray_address,
        timeout_s=config.deadlines.start_s,
        collective_timeout_s=config.deadlines.collective_s,
        log_dir=run_dir / "logs",
        seed=config.trainer.seed,
        preload=[HOSTS[BackendKind.TRAIN].partition(":")[0], *engines, *PRELOAD],
        interpreters={name: environment.python for name, environment in isolated.items() if environment is not None},
        forward_env=placement.forward_env,
        network_interface=placement.network_interface,
        shared_folder=run_dir,
        before_connect=before_connect,
    )
