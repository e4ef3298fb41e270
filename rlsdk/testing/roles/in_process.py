"""Roles in this process: real engines without a cluster, for tests and debugging."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlsdk.config import Role
from rlsdk.interfaces import Batch, RankContext
from rlsdk.testing.roles.in_process_group import InProcessGroup
from rlsdk.trainer.roles.hosts import EngineOptions, RolloutHost, TrainHost
from rlsdk.trainer.roles.role_group import RoleGroup

if TYPE_CHECKING:
    from rlsdk.registry import Registry


class InProcessStore:
    """Satisfies `BatchStore`: `put` returns the batch itself."""

    def put(self, batch: Batch) -> Batch:
        return batch


def start_in_process(role: Role, registry: Registry, *, ranks: int = 1, seed: int = 0) -> RoleGroup:
    """Builds the hosts of a role in this process, each on its own thread. Train engines of one rank only: there is no
    process group."""
    spec = registry.backend(role.kind, role.backend)
    host = RolloutHost if role.is_rollout else TrainHost

    def make(rank: int) -> RolloutHost | TrainHost:
        ctx = RankContext(role=role.name, rank=rank, world_size=ranks, local_rank=rank, seed=seed)
        return host(ctx, spec.engine, role.spec, EngineOptions(spec=spec, raw=dict(role.options)))  # type: ignore[arg-type]

    group = InProcessGroup(role.name, [functools.partial(make, rank) for rank in range(ranks)])
    return RoleGroup(role=role, spec=spec, group=group)


def close_in_process(groups: Iterable[RoleGroup]) -> None:
    """Closes the engines, threads and event loops that `start_in_process` started."""
    for group in groups:
        assert isinstance(group.group, InProcessGroup)
        group.group.close()
