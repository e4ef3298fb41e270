"""Everything that a run holds while it is running: one group per role, the weight sync between them, and device
turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.cluster import Cluster
from rlsdk.config import Role, ShardingConfig
from rlsdk.config.sections.role_kinds import ACTOR, REF, ROLLOUT
from rlsdk.interfaces import (
    BackendSpec,
    Batch,
    CheckpointError,
    ConfigError,
    EngineGroup,
    RolloutSpec,
    ShardingManager,
    WeightPart,
    nearest,
)
from rlsdk.sharding.transports.table import allowed_transports
from rlsdk.trainer.checkpoints.checkpoint import older_whole
from rlsdk.trainer.roles.adapter_sync import (
    BESIDE,
    ON_THREAD,
    AdapterSync,
    PartGroup,
    keeps_versions,
)
from rlsdk.trainer.roles.device_turns import DeviceTurns
from rlsdk.trainer.roles.devices import HOSTS
from rlsdk.trainer.roles.hosts import EngineOptions
from rlsdk.trainer.roles.role_group import BatchStore, PendingResult, RoleGroup

if TYPE_CHECKING:
    from rlsdk.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Session:
    """The running roles of a run."""

    roles: Mapping[str, RoleGroup]
    """By name, in the order of the table."""
    turns: DeviceTurns
    cluster: BatchStore
    manager: ShardingManager | None = None
    """Syncs weights to the rollout engine; None: nothing is sampled."""
    reference: Path | None = None
    """Folder of the reference policy if it is the result of a warm start; None: it is the configured model."""

    def __getitem__(self, name: str) -> RoleGroup:
        """The role of this name.

        Raises:
            ConfigError: the run has no such role; names the nearest one.
        """
        if name not in self.roles:
            raise ConfigError(f"this run has no role {name!r}{nearest(name, self.roles)}; it has {sorted(self.roles)}")
        return self.roles[name]

    @property
    def actor(self) -> RoleGroup:
        """The policy that is trained."""
        return self.roles[ACTOR]

    @property
    def rollout(self) -> RoleGroup:
        """The rollout engine that samples from the policy."""
        return self.roles[ROLLOUT]

    @property
    def is_own_reference(self) -> bool:
        """Whether the actor computes the reference's log-probs: it has an adapter, and no reference runs beside it."""
        return REF not in self.roles and self.actor.role.model.adapter is not None

    def computing(self, name: str) -> tuple[RoleGroup, str]:
        """Who computes the outputs of a role, and by which method of its hosts.

        Raises:
            ConfigError: the run has no such role.
        """
        if name == REF and self.is_own_reference:
            return self.actor, "forward_reference"
        return self[name], "forward"

    def keep_reference(self, *, timeout_s: float | None = None) -> None:
        """Makes the actor's adapter of now the reference."""
        with self.turns.using(ACTOR):
            self.actor.run("keep_reference", timeout_s=timeout_s)

    @property
    def trained(self) -> Mapping[str, RoleGroup]:
        """The trained roles, which a checkpoint must hold."""
        return {name: group for name, group in self.roles.items() if group.role.is_trained}

    def put(self, batch: Batch) -> Any:
        """Stores a batch once; returns a reference that can be passed to any method of any role."""
        return self.cluster.put(batch)

    def weights(self) -> ShardingManager:
        """The sharding manager that syncs the actor's weights to the rollout engine.

        Raises:
            ConfigError: the session was opened without a rollout engine.
        """
        if self.manager is None:
            raise ConfigError(f"this session has no rollout engine, only {sorted(self.roles)}; nothing can be sampled")
        return self.manager

    def save_roles(self, folder: Path, *, timeout_s: float | None = None) -> None:
        """Writes the checkpoint of every trained role into `folder/ROLE`, weights and optimizers."""
        for name, group in self.trained.items():
            (folder / name).mkdir()
            with self.turns.using(name, training=True):
                group.run("save_checkpoint", str(folder / name), timeout_s=timeout_s)

    def begin_save_roles(self, folder: Path) -> list[PendingResult]:
        """As `save_roles`, without waiting; later calls of the roles run after it."""
        answers = []
        for name, group in self.trained.items():
            (folder / name).mkdir()
            answers.append(group.submit("save_checkpoint", str(folder / name)))
        return answers

    @property
    def trained_move(self) -> bool:
        """Whether a trained role shares its devices in turns."""
        return any(group.role.pool in self.turns.shared for group in self.trained.values())

    def load_roles(self, checkpoint: Path, *, timeout_s: float | None = None) -> None:
        """Restores every trained role from `checkpoint/ROLE`.

        Raises:
            CheckpointError: a folder is missing, or does not fit the role's model or split; names the whole
                checkpoints beside it.
        """
        for name in self.trained:
            if not (checkpoint / name).is_dir():
                held = sorted(path.name for path in checkpoint.iterdir() if path.is_dir())
                raise CheckpointError(
                    f"checkpoint {str(checkpoint)!r} has no {name}/, so role {name!r} cannot be restored: it was "
                    f"written by a run without that role. It holds {held}; resume with the configuration beside it"
                )
        for name, group in self.trained.items():
            with self.turns.using(name, training=True):
                try:
                    group.run("load_checkpoint", str(checkpoint / name), timeout_s=timeout_s)
                except CheckpointError as error:
                    raise CheckpointError(f"{error}{older_whole(checkpoint)}") from error


def start_roles(
    table: Sequence[Role], start: Callable[[Role], RoleGroup], turns: DeviceTurns, *, at_once: bool = False
) -> dict[str, RoleGroup]:
    """Starts the groups of these roles; returns them in the order of the table.

    Within a pool rollout engines start last, since they measure the free memory and take most of it: roles that share
    their devices are built and offloaded before.

    Args:
        table: roles that have no group yet.
        start: makes the group of one role.
        turns: registers each role once it is built.
        at_once: start the pools in parallel; `start` is called from several threads.

    Raises:
        Exception: the first error of `start`; other pools may still be starting then.
    """
    pools: dict[str, list[Role]] = {}
    for role in sorted(table, key=lambda role: role.is_rollout):
        pools.setdefault(role.pool if at_once else "all", []).append(role)
    started: dict[str, RoleGroup] = {}

    def start_pool(members: Sequence[Role]) -> None:
        for role in members:
            turns.make_room(role.pool)
            started[role.name] = start(role)
            turns.add(started[role.name])

    if len(pools) < 2:
        for members in pools.values():
            start_pool(members)
    else:
        executor = ThreadPoolExecutor(len(pools), thread_name_prefix="rlsdk-start")
        starting = [executor.submit(start_pool, members) for members in pools.values()]
        executor.shutdown(wait=False)
        for done in as_completed(starting):
            done.result()
    return {role.name: started[role.name] for role in table}


def limit_controller_threads() -> None:
    """Limits this process to one compute thread."""
    import torch

    torch.set_num_threads(1)


def start_role(role: Role, registry: Registry, cluster: Cluster) -> RoleGroup:
    """Builds the hosts of a role, with the interpreter of its backend's own environment where it has one.

    Raises:
        ConfigError: the engine found an error in its configuration when it was built.
    """
    spec: BackendSpec = registry.backend(role.kind, role.backend)
    isolation = registry.isolation(spec)
    try:
        group = cluster.create_group(
            role.name,
            host=HOSTS[role.kind],
            # The worker builds the options: this process may be unable to import their class.
            args=(spec.engine, replace(role.spec, options=None), EngineOptions(spec=spec, raw=dict(role.options))),
            py_executable=isolation.python if isolation else None,
            devices_per_rank=role.devices_per_rank,
        )
    except ConfigError as error:
        if isolation is not None:
            error.add_note(f"{spec.kind} backend {spec.name!r} lives in {isolation.environment}")
        raise
    return RoleGroup(role=role, spec=spec, group=group)


def sharding_manager(
    sharding: ShardingConfig, registry: Registry, train: RoleGroup, rollout: RoleGroup, *, timeout_s: float
) -> ShardingManager:
    """The manager registered for this pair of backends, or else the generic one; of the adapter alone, if the rollout
    engine serves it as one."""

    def manager(source: EngineGroup, target: EngineGroup) -> ShardingManager:
        chosen = registry.sharding_manager(train.backend, rollout.backend, sharding.manager)
        made: ShardingManager = chosen(
            source,
            target,
            timeout_s=timeout_s,
            bucket_bytes=sharding.bucket_mb << 20,
            transports=allowed_transports(sharding.transport),
        )
        return made

    if rollout.role.model.adapter is None:
        return manager(train, rollout)
    base, adapter = (PartGroup(train, part) for part in WeightPart)
    spec = rollout.role.spec
    assert isinstance(spec, RolloutSpec)
    on_thread = BESIDE if keeps_versions(rollout.spec, spec) else ON_THREAD
    return AdapterSync(manager(base, rollout), manager(adapter, PartGroup(rollout, adapter.part, on_thread)))
