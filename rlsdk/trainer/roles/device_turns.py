"""Device turns: roles that share a device are offloaded and onloaded in stages, so that their peaks never add up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from rlsdk.cluster import PlacementSpec
from rlsdk.config.sections.role_kinds import ACTOR
from rlsdk.interfaces import Capability, RlsdkError, SyncReport
from rlsdk.trainer.roles.memory_moves import CACHE, WEIGHTS, RoleMemory, moves
from rlsdk.trainer.roles.role_group import RoleGroup


def shared_pools(placement: PlacementSpec, *, forced: bool = False) -> frozenset[str]:
    """Pools whose roles take turns: several roles on one accelerator. On a CPU moving is pointless, since all memory is
    main memory; `forced` enables turns there too."""
    return frozenset(
        pool.name
        for pool in placement.pools
        if len(placement.roles_of(pool.name)) > 1 and (forced or pool.device != "cpu")
    )


class DeviceTurns:
    """Tracks which parts of roles are on each pool's devices, and onloads the requested ones.

    Parts move only when needed: repeated use of one role costs nothing.
    """

    def __init__(self, *, shared: Collection[str] = (), timeout_s: float = 600.0) -> None:
        """Starts without roles.

        Args:
            shared: names of the pools whose roles take turns; in other pools nothing moves.
            timeout_s: timeout of each stage.
        """
        self.shared = frozenset(shared)
        self.timeout_s = timeout_s
        self._groups: dict[str, RoleGroup] = {}
        self._memories: dict[str, RoleMemory] = {}
        self._here: dict[str, frozenset[str]] = {}
        self._users: dict[str, list[str]] = {}
        self._lock = threading.RLock()

    def add(self, group: RoleGroup) -> None:
        """Registers a role that was just built and has all its parts on its devices."""
        role = group.role
        ability = Capability.SLEEP if role.is_rollout else Capability.OFFLOAD
        memory = RoleMemory(
            role=role.name,
            is_rollout=role.is_rollout,
            keeps_weights=role.keeps_weights,
            is_sampling=role.is_sampling,
            is_trained=role.is_trained,
            can_offload=group.can(ability),
        )
        with self._lock:  # pools start in parallel
            self._memories[role.name] = memory
            self._groups[role.name] = group
            self._here[role.name] = frozenset(memory.parts)

    def make_room(self, pool: str) -> None:
        """Offloads everything possible, because the next role measures free memory or loads a model."""
        self._bring(pool, {}, {})

    def on_device(self, role: str) -> frozenset[str]:
        """Parts of a role that are on its devices now."""
        return self._here[role]

    @contextmanager
    def using(self, role: str, *, training: bool = False) -> Iterator[Mapping[str, float]]:
        """Context manager: inside, a train role's weights are on its devices, or all of a teacher's rollout engine, and
        other roles of its pool are off.

        Args:
            role: name of the role.
            training: also onload optimizer and gradients: for updates, and to save or load a checkpoint.

        Yields:
            Seconds of each move.

        Raises:
            RlsdkError: another role is using the same devices.
        """
        memory = self._memories[role]
        parts = frozenset(memory.parts if training or memory.is_rollout else (WEIGHTS,))
        stages: dict[str, float] = {}
        pool = self._pool(role)
        with self._held(pool, role):
            if not parts <= self._here[role]:
                self._bring(pool, {role: parts}, stages)
            else:  # Other parts of the role may stay; other roles are offloaded.
                self._bring(pool, {role: self._here[role]}, stages)
            yield stages

    @contextmanager
    def rollout(self, sync: Callable[[], SyncReport], *, source: str = ACTOR) -> Iterator[SyncReport]:
        """Context manager: inside, the rollout engines serve the synced weights and use the memory of their devices.

        If they share devices with the source, optimizer and gradients are offloaded before the serving weights are
        onloaded; after the sync, the training weights are offloaded before the KV cache is allocated. At the end the
        engines sleep.

        Args:
            sync: moves the weights; called when both sides have their weights on their devices.
            source: role that provides the weights.

        Yields:
            The report of `sync` with the seconds of every stage; the seconds of falling asleep are added at the end.

        Raises:
            RlsdkError: another role is using the same devices.
        """
        serving = [role for role, memory in self._memories.items() if memory.is_sampling]
        pools = dict.fromkeys(self._pool(role) for role in serving)
        stages: dict[str, float] = {}
        with self._all_held(list(pools), " and ".join(serving)):
            try:
                report = self._synced(sync, source, serving, stages)
                for pool in pools:
                    self._bring(pool, {role: frozenset((WEIGHTS, CACHE)) for role in serving}, stages)
                yield replace(report, seconds=sum(stages.values()), stages_s=stages) if stages else report
            except BaseException:
                with suppress(RlsdkError):  # the first error is reported
                    self._fall_asleep(serving, stages)
                raise
            self._fall_asleep(serving, stages)

    def _fall_asleep(self, serving: Sequence[str], stages: dict[str, float]) -> None:
        for pool in dict.fromkeys(map(self._pool, serving)):
            self._bring(pool, {}, stages, only=serving)

    def _synced(
        self, sync: Callable[[], SyncReport], source: str, serving: Sequence[str], stages: dict[str, float]
    ) -> SyncReport:
        """Syncs once both sides have their weights on their devices; on shared devices, nothing else of them."""
        home = self._pool(source)
        targets = {role: frozenset((WEIGHTS,)) for role in serving}
        for pool in dict.fromkeys((home, *map(self._pool, serving))):
            mine = {role: parts for role, parts in targets.items() if self._pool(role) == pool}
            if pool == home and mine:
                mine[source] = frozenset((WEIGHTS,))
            elif pool == home:
                if WEIGHTS in self._here[source]:
                    continue
                mine = {source: frozenset((WEIGHTS,))}
            self._bring(pool, mine, stages)
        report = sync()
        if stages:
            stages.update(report.stages_s)
        return report

    def _pool(self, role: str) -> str:
        return self._groups[role].role.pool

    def _bring(
        self,
        pool: str,
        wanted: Mapping[str, frozenset[str]],
        stages: dict[str, float],
        *,
        only: Collection[str] | None = None,
    ) -> None:
        """Makes the moves of one pool; `only`: restrict them to these roles."""
        if pool not in self.shared:
            return
        with self._lock:
            memories = [
                s for s in self._memories.values() if self._pool(s.role) == pool and (only is None or s.role in only)
            ]
            for move in moves(memories, self._here, wanted):
                start = time.perf_counter()
                self._groups[move.role].run(move.method, move.argument, timeout_s=self.timeout_s)
                stages[move.stage] = stages.get(move.stage, 0.0) + time.perf_counter() - start
                self._here[move.role] = move.after

    @contextmanager
    def _held(self, pool: str, user: str) -> Iterator[None]:
        """Reserves the devices of a pool with turns for one role, which may use them repeatedly."""
        users = self._users.setdefault(pool, [])
        with self._lock:
            if pool in self.shared and any(other != user for other in users):
                raise RlsdkError(
                    f"{user!r} cannot have the devices of pool {pool!r}: {users[-1]!r} is using them, and the roles of "
                    "this pool take turns; end its use first, or give one of them a pool of its own (placement.roles)"
                )
            users.append(user)
        try:
            yield
        finally:
            with self._lock:
                users.remove(user)

    @contextmanager
    def _all_held(self, pools: Sequence[str], user: str) -> Iterator[None]:
        if not pools:
            yield
            return
        with self._held(pools[0], user), self._all_held(pools[1:], user):
            yield
