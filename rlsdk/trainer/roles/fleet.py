"""Tracks which rollout replicas of a run serve, and with which weights. A lost replica is restarted, and serves again
once its own sync, or the next sync of all replicas, has returned its receipt."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from textwrap import shorten
from typing import TYPE_CHECKING, Protocol

from rlsdk.cluster import Cluster, WorkerGroup
from rlsdk.cluster.ray_cluster.daemons import dead_daemon
from rlsdk.interfaces import SyncReport
from rlsdk.rollouts.client.health import Event, Health, State
from rlsdk.trainer.roles.rank_sync import MakeManager, RanksGoneError, RankSync
from rlsdk.trainer.roles.ranks import LosableRanks
from rlsdk.trainer.roles.serving import ReplicasLostError, ServedWeights

if TYPE_CHECKING:
    from rlsdk.trainer.roles.session import Session

LOOK_S = 0.5
MAX_QUOTED = 200
"""Largest number of characters of an error that a notice quotes."""
STUCK_S = 10.0
"""Seconds after which a pending publish counts as stuck; without an obstacle it takes less."""


class Restarter(Protocol):
    """The part of a cluster's interface that a fleet needs."""

    def restart(self, role: str, rank: int) -> None: ...


class Fleet(ServedWeights):
    """Satisfies `rlsdk.rollouts.Restarts`. Its methods may be called from any thread."""

    def __init__(
        self,
        session: Session,
        group: LosableRanks,
        restarter: Restarter,
        make_manager: MakeManager,
        *,
        max_restarts: int,
        keeps_copy: bool,
        drains: bool,
        timeout_s: float,
        notice: Callable[[str], None],
        num_versions: int = 1,
        dead_daemon: Callable[[], str | None] = dead_daemon,
    ) -> None:
        """Starts nothing.

        Args:
            session: its actor's weights are synced to its rollout engine.
            group: the ranks of the rollout engine.
            restarter: restarts the process of a rank.
            make_manager: makes a sharding manager from the actor to some of the ranks.
            max_restarts: consecutive restarts of one replica without progress in between.
            keeps_copy: keep a copy of the served weights, because the actor trains while replicas serve.
            drains: weights are published only when all samples are finished.
            timeout_s: timeout of each call of the actor, and of a sync's waits for ranks.
            notice: receives messages about lost and restarted replicas.
            num_versions: newest versions of an adapter that each replica serves side by side, while samples run.
            dead_daemon: returns the name of a cluster daemon that has ended, or None. Without it no process can be
                started, and a request for one makes Ray end this process a minute later.
        """
        super().__init__(session, timeout_s=timeout_s, num_copies=num_versions)
        self._published: deque[int] | None = deque(maxlen=num_versions) if num_versions > 1 else None
        """Versions that replicas serve side by side, oldest first; None: each serves one."""
        self._sync = RankSync(session, group, make_manager, timeout_s=timeout_s)
        self._restarter = restarter
        self._max_restarts = max_restarts
        self._keeps_copy, self._drains = keeps_copy, drains
        self._notice = notice
        self._dead_daemon = dead_daemon
        self.health: Sequence[Health] = [Health() for _ in range(session.rollout.world_size)]
        self._restarts = 0
        self._sync_lock = threading.RLock()
        """Lock held during a weight sync: one sync at a time."""
        self._changed = threading.Condition()
        self._errors: dict[int, BaseException] = {}
        self._waiting: dict[int, list[Future[None]]] = {}
        self._source: int | None = None
        """Version of the actor's weights if the replicas serve the same version; None: they serve another one."""
        self._has_snapshot = False
        self._closed = False

    # Of `ServedWeights`:

    def snapshot(self) -> None:
        with self._sync_lock:
            self._source = None
            super().snapshot()
            self._has_snapshot = True

    def release(self) -> None:
        """Keeps the copy: a replica that is restarted may need it."""

    def invalidate(self) -> None:
        if not self._keeps_copy:
            with self._sync_lock:
                self._source = None

    def sync(self, version: int, *, expect_change: bool) -> SyncReport:
        """See `ServedWeights`. Unavailable replicas, or replicas lost during the sync, do not delay the others; if
        all are unavailable, waits for the first one that is back."""
        with self._sync_lock:
            self._source = None
            if self._keeps_copy and not self._has_snapshot:
                super().snapshot()
            self._has_snapshot = False
            while True:
                ranks = self._bring_up_new(self._running_ranks())
                if not ranks:
                    continue
                report = self._sync_ranks(ranks, version, expect_change)
                if report is not None:
                    self._source = version
                    if self._published is not None:
                        self._published.append(version)
                    self._mark_serving(ranks)
                    return report

    @property
    def restarts(self) -> int:
        return self._restarts

    def close(self) -> None:
        """Stops all restarts."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # Of `Restarts`:

    async def revive(self, at: int, life: int, error: BaseException) -> None:
        revived: Future[None] = Future()
        revived.set_running_or_notify_cancel()
        self._lost(at, life, error, revived)
        waiting = asyncio.wrap_future(revived)
        while not (await asyncio.wait({waiting}, timeout=LOOK_S))[0]:
            if (dead := self._dead_daemon()) is not None:
                with self._changed:
                    self._retire(at, _without_daemon(at, dead))
        waiting.result()

    def _lost(self, at: int, life: int, error: BaseException, waiting: Future[None] | None = None) -> None:
        """Starts a restart of a lost replica, unless one is running or done."""
        health = self.health[at]
        with self._changed:
            begins = health.life == life and health.state not in (State.RESTARTING, State.RETIRED)
            if begins and not self._closed:
                self._errors[at] = error
                health.handle(Event.FAILED)
                begins = self._begin_restart(at)
            if waiting is not None:
                self._waiting.setdefault(at, []).append(waiting)
            self._resolve_waiting(at)
        if begins and not self._closed:
            threading.Thread(target=self._restart, args=(at,), name="rlsdk-restart", daemon=True).start()

    def _begin_restart(self, at: int) -> bool:
        """Starts a restart; False if the replica was lost too often. The caller holds the state lock."""
        health, error = self.health[at], self._errors[at]
        said = shorten(str(error).splitlines()[0], MAX_QUOTED)
        if (dead := self._dead_daemon()) is not None:
            self._retire(at, _without_daemon(at, dead))
            return False
        if health.in_a_row >= self._max_restarts:
            lost = ReplicasLostError(
                f"replica {at} of {self._session.rollout.backend!r} was lost and is not started again "
                f"(faults.replica_restarts {self._max_restarts}): {error}"
            )
            self._retire(at, lost)
            self._notice(f"warning: replica {at} is lost for good after {health.in_a_row} restarts in a row: {said}")
            return False
        health.handle(Event.RESTART)
        self._notice(
            f"warning: replica {at} was lost and is started again ({health.in_a_row} of {self._max_restarts} in a "
            f"row); others take what it had: {said}"
        )
        return True

    def _retire(self, at: int, error: ReplicasLostError) -> None:
        """Gives a replica up, unless it serves. The caller holds the state lock."""
        health = self.health[at]
        if health.state is State.RETIRED or health.serves:
            return
        health.handle(Event.FAILED)
        health.handle(Event.GIVEN_UP)
        self._errors[at] = error
        self._resolve_waiting(at)

    def _resolve_waiting(self, at: int) -> None:
        """Resolves the futures that wait for a replica once it serves or is given up. The caller holds the state
        lock."""
        state = self.health[at].state
        if self.health[at].serves:
            for waiting in self._waiting.pop(at, ()):
                waiting.set_result(None)
        elif state is State.RETIRED:
            for waiting in self._waiting.pop(at, ()):
                waiting.set_exception(self._errors[at])
        self._changed.notify_all()

    # On a thread of each restart:

    def _restart(self, at: int) -> None:
        began = time.monotonic()
        life = self.health[at].life
        try:
            self._restarter.restart(self._session.rollout.name, at)
        except Exception as error:
            with self._changed:
                self.health[at].handle(Event.FAILED, life)
            self._lost(at, life, error)
            return
        with self._changed:
            if self.health[at].state is not State.RESTARTING:  # given up meanwhile
                return
            self.health[at].handle(Event.STARTED, life)
            self._restarts += 1
            self._resolve_waiting(at)
        self._catch_up(at, life)
        if self.health[at].serves and self.health[at].life == life:
            self._notice(f"replica {at} serves again after {time.monotonic() - began:.1f} s")

    def _catch_up(self, at: int, life: int) -> None:
        """Syncs a restarted replica to the weights that the others serve, or waits for the next publish, which brings
        newer weights."""
        stuck_since = time.monotonic()
        while self.health[at].state is State.SYNCING and self.health[at].life == life and not self._closed:
            if self._sync_lock.acquire(timeout=LOOK_S):
                try:
                    self._sync_alone(at)
                finally:
                    self._sync_lock.release()
                if not self._is_stuck():
                    stuck_since = time.monotonic()
                elif time.monotonic() - stuck_since > STUCK_S:
                    self._give_up_stuck(at, life)
                    return
            else:
                stuck_since = time.monotonic()
            with self._changed:
                if self.health[at].state is State.SYNCING:
                    self._changed.wait(LOOK_S)

    def _sync_alone(self, at: int) -> None:
        """Syncs one replica; does nothing if the served weights are not available. The caller holds the sync lock."""
        if self.health[at].state is not State.SYNCING:
            return
        try:
            if self._published:
                served = self._bring_up(at, unpublished=self._has_snapshot)
            else:
                served = self._source is not None and self._sync_ranks([at], self._source, False) is not None
            if served:
                self._mark_serving([at])
        except Exception as error:
            self._lost(at, self.health[at].life, error)

    def _is_stuck(self) -> bool:
        """Whether the run is stuck: newer weights are published once all samples are finished, and no replica is left
        to finish them."""
        return self._keeps_copy and self._drains and self._source is None and not any(h.serves for h in self.health)

    def _give_up_stuck(self, at: int, life: int) -> None:
        with self._changed:
            health = self.health[at]
            if health.life == life and health.state is State.SYNCING:
                lost = ReplicasLostError(
                    "every rollout replica was lost while newer weights waited to be published: the weights that "
                    "samples under way were begun with are gone"
                )
                self._retire(at, lost)

    # The caller holds the sync lock:

    def _running_ranks(self) -> list[int]:
        """Ranks whose process is running; if there is none, waits for the first that is being restarted.

        Raises:
            BaseException: no process is running or being restarted.
        """
        with self._changed:
            while True:
                ranks = [at for at, h in enumerate(self.health) if h.serves or h.state is State.SYNCING]
                if ranks:
                    return ranks
                if self._closed or all(h.state is State.RETIRED for h in self.health):
                    raise self._errors[max(self._errors)]
                self._changed.wait(LOOK_S)

    def _sync_ranks(self, ranks: Sequence[int], version: int, expect_change: bool) -> SyncReport | None:
        """Syncs these ranks; None if some were lost during the sync, whose restart is started."""
        lives = {rank: self.health[rank].life for rank in ranks}
        try:
            return self._sync.sync(lives, version, expect_change=expect_change)
        except RanksGoneError as gone:
            for rank, error in gone.errors.items():
                self._lost(rank, self.health[rank].life, error)
            return None

    def _bring_up_new(self, ranks: Sequence[int]) -> list[int]:
        """Where several versions are served: brings a restarted replica to all that the others serve, before the next
        one is published. Returns the ranks that are still there."""
        if not self._published:
            return list(ranks)
        new = [at for at in ranks if self.health[at].state is State.SYNCING]
        gone = [at for at in new if not self._bring_up(at, unpublished=True)]
        return [at for at in ranks if at not in gone]

    def _bring_up(self, at: int, *, unpublished: bool) -> bool:
        """Sends the weights below the adapter and all published versions, oldest first; False if it was lost meanwhile.

        Args:
            at: the replica.
            unpublished: the actor has a copy that is newer than the published ones.
        """
        assert self._published is not None
        newest = len(self._published) - 1 + unpublished
        # The actor keeps as many copies as versions: beside one that is to be published, the oldest is not needed.
        first = max(0, newest + 1 - self._num_copies)
        try:
            for place, version in list(enumerate(self._published))[first:]:
                self._session.actor.run("use_adapter_copy", newest - place, timeout_s=self._timeout_s)
                if self._sync_ranks([at], version, False) is None:
                    return False
        finally:
            self._session.actor.run("use_adapter_copy", 0, timeout_s=self._timeout_s)
        return True

    def _mark_serving(self, ranks: Sequence[int]) -> None:
        """Marks these ranks as serving: their sync has returned checked receipts."""
        with self._changed:
            for rank in ranks:
                if self.health[rank].serves or self.health[rank].state is State.SYNCING:
                    self.health[rank].handle(Event.SYNCED)
                self._resolve_waiting(rank)


def _without_daemon(at: int, dead: str) -> ReplicasLostError:
    return ReplicasLostError(
        f"replica {at} was lost, and cannot be started again: a daemon of this run's Ray cluster has ended ({dead})"
    )


def fleet_of(
    session: Session,
    make_manager: MakeManager,
    *,
    max_restarts: int,
    keeps_copy: bool,
    drains: bool,
    timeout_s: float,
    notice: Callable[[str], None],
    num_versions: int = 1,
) -> Fleet | None:
    """Builds the fleet; None if replicas cannot be restarted, because they share the actor's processes or there is no
    cluster."""
    cluster, group = session.cluster, session.rollout.group
    if not max_restarts or not isinstance(cluster, Cluster) or not isinstance(group, WorkerGroup):
        return None
    if not cluster.can_restart(session.rollout.name):
        return None
    return Fleet(
        session,
        group,
        cluster,
        make_manager,
        max_restarts=max_restarts,
        keeps_copy=keeps_copy,
        drains=drains,
        timeout_s=timeout_s,
        notice=notice,
        num_versions=num_versions,
    )
