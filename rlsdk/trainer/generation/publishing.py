"""Publishing: syncs the actor's weights to the replicas, between two steps or while the next step trains."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

from rlsdk.interfaces import SyncReport
from rlsdk.rollouts import RolloutStream
from rlsdk.trainer.learner.metrics import StepClock
from rlsdk.trainer.learner.state import TrainerState
from rlsdk.trainer.roles.device_turns import DeviceTurns
from rlsdk.trainer.roles.serving import ServedWeights
from rlsdk.trainer.tracking.events import RunView

Done = Callable[[BaseException | None], None]
OnNewWeights = Literal["drain", "recompute", "keep"]


class Publisher(ABC):
    """Brings the actor's weights to the replicas: for the schedule's `Publish`, and for evaluations."""

    def __init__(
        self,
        weights: ServedWeights,
        turns: DeviceTurns,
        stream: RolloutStream,
        state: TrainerState,
        view: RunView,
        *,
        expects_change: bool,
    ) -> None:
        """Starts nothing.

        Args:
            weights: syncs the actor's weights to its rollout engine.
            turns: gives the devices to the replicas.
            stream: the stream that runs on the replicas.
            state: has the version of the weights.
            view: receives each sync report.
            expects_change: a sync after an update must change tensors.
        """
        self.weights = weights
        self.seconds = 0.0
        """Seconds of serving that the last publish cost the replicas."""
        self.last_report: SyncReport | None = None
        """Report of the last sync."""
        self._turns = turns
        self._stream = stream
        self._state = state
        self._view = view
        self._expects_change = expects_change
        self._serving = ExitStack()
        """Entered while the replicas have their devices; closed before training."""
        self._clock = StepClock()
        self._said_effect = False
        self._sampled_from = time.perf_counter()
        """When this step began to wait for samples: at its start, or once its weights are served."""

    @abstractmethod
    def publish(self, done: Done) -> None:
        """Syncs the weights to every replica. May return before it is done.

        Args:
            done: called, from any thread, when every replica serves them, or with the error.
        """

    @abstractmethod
    def snapshot(self) -> None:
        """Copies the current weights for the next `publish`; later training does not change the copy."""

    @contextmanager
    def clocked(self, clock: StepClock) -> Iterator[None]:
        """Measures the seconds of a step: swapping in and out is `sync`, time until the last sample is finished is
        `rollout`, time from then until it is graded is `reward`. A step whose samples all come from the journal only
        has `rollout`."""
        self._clock = clock
        self._sampled_from = time.perf_counter()
        try:
            with clock.measure("rollout"):
                yield
                waited, passed = self._stream.seconds_since_last_sample(), time.perf_counter() - self._sampled_from
                clock.move("rollout", "reward", waited if waited < passed else 0.0)
        finally:
            with clock.measure("sync"):
                self._serving.close()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Context manager: inside, the replicas have their devices and serve the current weights."""
        self._clock = StepClock()
        self._serve()
        try:
            yield
        finally:
            self._serving.close()

    def _serve(self) -> None:
        """Gives the replicas their devices, with the current weights, until `_serving` is closed."""
        start = time.perf_counter()
        self._serving.close()
        with ExitStack() as entered:
            self.last_report = entered.enter_context(self._turns.rollout(self._sync))
            entered.callback(self.weights.invalidate)
            self._serving = entered.pop_all()
        self._sampled_from = time.perf_counter()
        self._clock.move("rollout", "sync", self._sampled_from - start)
        self._view.synced(self.last_report)

    def _sync(self) -> SyncReport:
        version, changed = self._version()
        report = self.weights.sync(version, expect_change=changed)
        self._state.expects_change = False
        self._check_effect(report, changed)
        return report

    def _check_effect(self, report: SyncReport, changed: bool) -> None:
        """Warns once if a trained adapter changes nothing of what the replicas compute."""
        if changed and report.effect == 0.0 and not self._said_effect:
            self._said_effect = True
            self._view.notice(
                f"warning: the adapter of version {report.version} changes no logit of a probe on the rollout engine "
                "(sync/adapter_effect 0): samples are those of the model without it. Expected only if the learning "
                "rate is so small that rounding hides all steps so far; else use model.lora.sync merged"
            )

    def _version(self) -> tuple[int, bool]:
        """Version of the current weights, and whether they must differ from those of the last sync."""
        return self._state.policy_version, self._expects_change and self._state.expects_change


class BlockingPublisher(Publisher):
    """For runs that generate groups between steps, on devices that training may share: a publish ends when the replicas
    serve the current weights, and they keep their devices until the step trains."""

    def publish(self, done: Done) -> None:
        start = time.perf_counter()
        self._serve()
        self.seconds = time.perf_counter() - start
        done(None)

    def snapshot(self) -> None:
        raise RuntimeError("internal error: a synchronous schedule publishes the current weights, never a snapshot")


class OverlappedPublisher(Publisher):
    """For runs whose training and rollout have separate pools: a publish runs on a thread of its own while the next
    step trains, from a snapshot on the trainer's side. Publishes do not overlap."""

    def __init__(
        self,
        weights: ServedWeights,
        turns: DeviceTurns,
        stream: RolloutStream,
        state: TrainerState,
        view: RunView,
        *,
        expects_change: bool,
        on_new_weights: OnNewWeights,
        timeout_s: float,
        by_version: bool = False,
    ) -> None:
        """As `Publisher`.

        Args:
            on_new_weights: what happens to running samples. `drain`: none are running when `publish` is called, or
                with `by_version` they go on.
            timeout_s: timeout of each pause and resume.
            by_version: replicas serve several versions side by side, and decode while one arrives.
        """
        super().__init__(weights, turns, stream, state, view, expects_change=expects_change)
        self._on_new_weights = on_new_weights
        self._timeout_s, self._by_version = timeout_s, by_version
        self._copied: tuple[int, bool] | None = None
        """Of the snapshot: see `_version`."""
        self._thread: threading.Thread | None = None

    def snapshot(self) -> None:
        """See `Publisher`. Blocks until the copy is made."""
        self._copied = self._take_version()
        self.weights.snapshot()

    def publish(self, done: Done) -> None:
        if self._thread is not None:
            self._thread.join()
        copied, self._copied = self._copied, None
        version, changed = copied or self._take_version()
        work = (version, changed, copied is not None, done)
        self._thread = threading.Thread(target=self._publish, args=work, name="rlsdk-publish", daemon=True)
        self._thread.start()

    def _take_version(self) -> tuple[int, bool]:
        """As `_version`, for a sync that follows while the next step trains."""
        version = self._version()
        self._state.expects_change = False
        return version

    def _publish(self, version: int, changed: bool, copied: bool, done: Done) -> None:
        running, start = self._on_new_weights != "drain", time.perf_counter()
        try:
            if running:
                self._stream.interrupt(self._timeout_s)
            self.last_report = report = self.weights.sync(version, expect_change=changed)
            self._check_effect(report, changed)
            if running:
                self._stream.resume(self._timeout_s, keep_cache=self._on_new_weights == "keep")
            self._view.synced(report)
            self.seconds = time.perf_counter() - start
            if self._by_version:
                pauses = [receipt.pause_s for receipt in report.receipts if receipt.pause_s is not None]
                self.seconds = max(pauses, default=self.seconds)
            if copied:
                self.weights.release()
        except BaseException as error:
            done(error)
        else:
            done(None)
