"""Syncs weights to the rollout ranks that are available."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rlsdk.interfaces import RlsdkError, ShardingManager, SyncReport
from rlsdk.trainer.roles.adapter_sync import AdapterSync
from rlsdk.trainer.roles.ranks import LosableRanks, SomeRanks

if TYPE_CHECKING:
    from rlsdk.trainer.roles.role_group import RoleGroup
    from rlsdk.trainer.roles.session import Session

MakeManager = Callable[["RoleGroup"], ShardingManager]


class RanksGoneError(RlsdkError):
    """Ranks died during a sync, or did not answer in time."""

    def __init__(self, errors: Mapping[int, RlsdkError]) -> None:
        """`errors`: by rank."""
        super().__init__(errors)
        self.errors = dict(errors)

    def __str__(self) -> str:
        return "; ".join(f"rank {rank}: {error}" for rank, error in sorted(self.errors.items()))


class RankSync:
    """Caches the sharding manager of the ranks that were synced last; makes a new one only if the ranks change, or a
    rank has a new process."""

    def __init__(self, session: Session, group: LosableRanks, make_manager: MakeManager, *, timeout_s: float) -> None:
        """Creates no manager yet.

        Args:
            session: session whose actor's weights are synced to its rollout engine.
            group: the ranks of the rollout engine.
            make_manager: makes a sharding manager from the actor to some of the ranks.
            timeout_s: timeout of each call of the actor, and of a sync's waits for ranks.
        """
        self._session, self._group = session, group
        self._make_manager = make_manager
        self._timeout_s = timeout_s
        self._made: tuple[Mapping[int, int], ShardingManager, SomeRanks] | None = None
        """The cached manager, with the ranks and process numbers that it was made for."""
        self._has_synced = False
        self._has_base: dict[int, int] = {}
        """Ranks that were sent the weights below an adapter -> number of the process that has them."""

    def sync(self, lives: Mapping[int, int], version: int, *, expect_change: bool) -> SyncReport:
        """Syncs the actor's weights to these ranks.

        Args:
            lives: rank -> number of its process.
            version: version of the weights.
            expect_change: some tensor must differ from the served weights.

        Raises:
            RanksGoneError: some of them were lost during the sync.
            RlsdkError: see `ShardingManager.sync_weights`.
        """
        manager, called = self._manager_of(lives)
        called.gone.clear()
        try:
            report = manager.sync(version, expect_change=expect_change)
            self._has_base.update(lives)
            return report
        except RlsdkError as error:
            if not called.gone:
                raise
            self._made = None
            raise RanksGoneError(called.gone) from error

    def _manager_of(self, lives: Mapping[int, int]) -> tuple[ShardingManager, SomeRanks]:
        """Returns the cached manager, or makes a new one after closing the actor's transports: the state that the
        two ends keep between syncs is valid only for one set of ranks."""
        if self._made is None or self._made[0] != lives:
            if self._has_synced:
                self._session.actor.run("close_transports", timeout_s=self._timeout_s)
            self._has_synced = True
            called = SomeRanks(self._group, list(lives), self._timeout_s)
            manager = self._make_manager(replace(self._session.rollout, group=called))
            if isinstance(manager, AdapterSync):
                manager.has_base = lives.items() <= self._has_base.items()
            self._made = dict(lives), manager, called
        return self._made[1], self._made[2]
