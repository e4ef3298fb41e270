"""Publishing weights: from the actor to the replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlsdk.interfaces import SyncReport, WorkerError

if TYPE_CHECKING:
    from rlsdk.trainer.session import Session


class ReplicasLostError(WorkerError):
    """Rollout replicas are gone, and cannot be made again within the session."""


class ServedWeights:
    """Brings the actor's weights to every replica; a replica that is lost ends it. `Fleet` continues without it."""

    def __init__(self, session: Session, *, timeout_s: float) -> None:
        """`timeout_s`: of each call of the actor."""
        self._session = session
        self._timeout_s = timeout_s

    def hold(self) -> None:
        """Keeps the weights of now aside for the next `sync`; what is trained later does not change them. Blocks until
        the copy is made."""
        self._session.actor.run("hold_weights", timeout_s=self._timeout_s)

    def release(self) -> None:
        """What was kept has been brought to the replicas."""
        self._session.actor.run("release_weights", timeout_s=self._timeout_s)

    def sync(self, version: int, *, expect_change: bool) -> SyncReport:
        """Brings the weights that were kept, or else those of now, to the replicas.

        Raises:
            WeightSyncError: see `ShardingManager.sync_weights`.
            WorkerError: a process died.
        """
        return self._session.weights().sync(version, expect_change=expect_change)

    def leave(self) -> None:
        """From here on the actor's weights may be others than those that are served."""

    def close(self) -> None:
        """The run is over."""

    @property
    def restarts(self) -> int:
        """Processes of replicas that were started in place of lost ones, over the whole run."""
        return 0
