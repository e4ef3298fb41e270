"""Publishing weights: from the actor to the replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlsdk.interfaces import SyncReport, WorkerError

if TYPE_CHECKING:
    from rlsdk.trainer.roles.session import Session


class ReplicasLostError(WorkerError):
    """Rollout replicas are lost, and cannot be restarted within the session."""


class ServedWeights:
    """Syncs the actor's weights to every replica. A lost replica is an error here; `Fleet` continues without it."""

    def __init__(self, session: Session, *, timeout_s: float, num_copies: int = 1) -> None:
        """
        Args:
            session: of the run.
            timeout_s: for each call of the actor.
            num_copies: copies that the actor keeps, for replicas that serve as many versions.
        """
        self._session = session
        self._timeout_s = timeout_s
        self._num_copies = num_copies

    def snapshot(self) -> None:
        """Copies the current weights for the next `sync`; later training does not change the copy. Blocks until the
        copy is complete."""
        is_apart = self._session.rollout.role.model.adapter is not None
        self._session.actor.run("hold_weights", is_apart, self._num_copies, timeout_s=self._timeout_s)

    def release(self) -> None:
        """Called after the copy was synced to the replicas; ends the use of the copy."""
        self._session.actor.run("release_weights", timeout_s=self._timeout_s)

    def sync(self, version: int, *, expect_change: bool) -> SyncReport:
        """Syncs the copied weights, or else the current ones, to the replicas.

        Raises:
            WeightSyncError: see `ShardingManager.sync_weights`.
            WorkerError: a process died.
        """
        return self._session.weights().sync(version, expect_change=expect_change)

    def invalidate(self) -> None:
        """Called when the actor's weights may begin to differ from the served ones."""

    def close(self) -> None:
        """Called when the run is over."""

    @property
    def restarts(self) -> int:
        """Number of replica restarts over the whole run."""
        return 0
