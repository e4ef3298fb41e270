"""Syncs weights to the replicas while the next step trains, from a copy on the trainer's side."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol

from rlsdk.interfaces import SyncReport

if TYPE_CHECKING:
    from rlsdk.rollouts import RolloutStream
    from rlsdk.trainer.generation.phases import RolloutPhase
    from rlsdk.trainer.learner.state import TrainerState
    from rlsdk.trainer.roles.serving import ServedWeights

Done = Callable[[BaseException | None], None]
OnNewWeights = Literal["drain", "recompute", "keep"]


class Publisher(Protocol):
    """Interface through which a source of groups publishes weights."""

    seconds: float
    """Seconds of serving that the last publish cost the replicas."""

    @property
    def last_report(self) -> SyncReport | None:
        """Sync report of the last publish."""
        ...

    def hold(self) -> None:
        """Copies the current weights for the next `publish`; later training does not change the copy."""
        ...

    def publish(self, done: Done) -> None:
        """Syncs the copied weights, or else the current ones, to every replica. May return before it is done.

        Args:
            done: called, from any thread, when every replica serves them, or with the error.
        """
        ...


class TurnsPublisher:
    """Satisfies `Publisher` for runs that generate groups between steps: syncs the current weights and waits."""

    def __init__(self, phase: RolloutPhase) -> None:
        self._phase = phase
        self.seconds = 0.0

    @property
    def last_report(self) -> SyncReport | None:
        """Sync report of the last publish."""
        return self._phase.last_report

    def hold(self) -> None:
        raise RuntimeError("a synchronous schedule holds no weights: a driver's mistake")

    def publish(self, done: Done) -> None:
        start = time.perf_counter()
        self._phase.publish()
        self.seconds = time.perf_counter() - start
        done(None)


class OverlappedPublisher:
    """Satisfies `Publisher` for runs whose training and rollout have separate pools. Publishes do not overlap."""

    def __init__(
        self,
        weights: ServedWeights,
        stream: RolloutStream,
        state: TrainerState,
        *,
        on_new_weights: OnNewWeights,
        expects_change: bool,
        timeout_s: float,
        synced: Callable[[SyncReport], None],
    ) -> None:
        """Starts nothing.

        Args:
            weights: syncs the actor's weights to its rollout engine.
            stream: the stream that runs on the replicas.
            state: contains the version of the weights.
            on_new_weights: what happens to running samples. `drain`: none are running when `publish` is called.
            expects_change: a sync after an update must change tensors.
            timeout_s: timeout of each pause and resume.
            synced: called with each sync report.
        """
        self._weights = weights
        self._stream = stream
        self._state = state
        self._on_new_weights = on_new_weights
        self._expects_change = expects_change
        self._timeout_s = timeout_s
        self._synced = synced
        self._held: tuple[int, bool] | None = None
        self._thread: threading.Thread | None = None
        self._report: SyncReport | None = None
        self.seconds = 0.0

    @property
    def last_report(self) -> SyncReport | None:
        """Sync report of the last publish."""
        return self._report

    def hold(self) -> None:
        """See `Publisher`. Blocks until the copy is made."""
        self._held = self._version()
        self._weights.hold()

    def publish(self, done: Done) -> None:
        self.close()
        held, self._held = self._held, None
        version, changed = held or self._version()
        work = (version, changed, held is not None, done)
        self._thread = threading.Thread(target=self._publish, args=work, name="rlsdk-publish", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits for the running publish."""
        if self._thread is not None:
            self._thread.join()

    def _version(self) -> tuple[int, bool]:
        """Version of the current weights, and whether they must differ from those of the last sync."""
        found = self._state.policy_version, self._expects_change and self._state.expects_change
        self._state.expects_change = False
        return found

    def _publish(self, version: int, changed: bool, held: bool, done: Done) -> None:
        try:
            start = time.perf_counter()
            self._bring(version, changed)
            self.seconds = time.perf_counter() - start
            if held:
                self._weights.release()
        except BaseException as error:
            done(error)
        else:
            done(None)

    def _bring(self, version: int, changed: bool) -> None:
        running = self._on_new_weights != "drain"
        if running:
            self._stream.interrupt(self._timeout_s)
        self._report = report = self._weights.sync(version, expect_change=changed)
        if running:
            self._stream.resume(self._timeout_s, keep_cache=self._on_new_weights == "keep")
        self._synced(report)
