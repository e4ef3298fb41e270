"""Brings weights to the replicas while the next step trains: from a copy that the trainer's side keeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol

from rlsdk.interfaces import SyncReport

if TYPE_CHECKING:
    from rlsdk.rollouts import RolloutStream
    from rlsdk.trainer.phases import RolloutPhase
    from rlsdk.trainer.serving import ServedWeights
    from rlsdk.trainer.state import TrainerState

Done = Callable[[BaseException | None], None]
OnNewWeights = Literal["drain", "recompute", "keep"]


class Publisher(Protocol):
    """What a source of groups needs to have weights published."""

    seconds: float
    """That the last publish took from the replicas."""

    @property
    def last_report(self) -> SyncReport | None:
        """Of the last publish."""
        ...

    def hold(self) -> None:
        """Keeps the weights of now aside for the next `publish`; what is trained later does not change them."""
        ...

    def publish(self, done: Done) -> None:
        """Brings the weights that were kept, or else those of now, to every replica. May return at once.

        Args:
            done: called when every replica serves them, or with what went wrong; from any thread.
        """
        ...


class TurnsPublisher:
    """Satisfies `Publisher` where groups are made between steps: brings the weights of now, and waits for it."""

    def __init__(self, phase: RolloutPhase) -> None:
        self._phase = phase
        self.seconds = 0.0

    @property
    def last_report(self) -> SyncReport | None:
        """Of the last publish."""
        return self._phase.last_report

    def hold(self) -> None:
        raise RuntimeError("a synchronous schedule holds no weights: a driver's mistake")

    def publish(self, done: Done) -> None:
        start = time.perf_counter()
        self._phase.publish()
        self.seconds = time.perf_counter() - start
        done(None)


class OverlappedPublisher:
    """Satisfies `Publisher` for their own pools. One publish at a time."""

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
            weights: of the actor, on their way to its rollout engine.
            stream: what runs on the replicas.
            state: gives the version of the weights.
            on_new_weights: what running samples do. `drain`: there are none when `publish` is called.
            expects_change: a sync after an update must find changed tensors.
            timeout_s: for each pause and resume.
            synced: called with each report.
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
        """Of the last publish."""
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
        """Waits for the publish that is under way."""
        if self._thread is not None:
            self._thread.join()

    def _version(self) -> tuple[int, bool]:
        """Of the weights of now; and whether they must differ from those before."""
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
            self._stream.go_on(self._timeout_s, keep_cache=self._on_new_weights == "keep")
        self._synced(report)
