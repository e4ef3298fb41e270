"""Starts a cluster in the background, before the program needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType

from rlsdk.cluster.cluster import Cluster
from rlsdk.interfaces import WorkerError
from rlsdk.system.interrupts import is_interrupt, wait_for_abandoned, wait_or_abandon


class BackgroundCluster:
    """Starts the cluster on construction. Use it as a context manager around all use of the cluster: a cluster that was
    not taken is closed at the end."""

    def __init__(self, start: Callable[[Callable[[], None]], Cluster]) -> None:
        """Calls `start` on its own thread.

        Args:
            start: makes the cluster. Its argument is a function to call before this process connects to Ray; it raises
                an error if the cluster is no longer wanted.
        """
        wait_for_abandoned()  # Ray is one for the whole process
        # Here and not there: two imports at a time take turns, and Ray's daemons would be started late.
        import ray  # noqa: F401

        self._starting: Future[Cluster] | None = Future()
        self._is_over = threading.Event()
        self._is_given_up = False
        threading.Thread(
            target=self._run, args=(start, self._starting), name="rlsdk-cluster-start", daemon=True
        ).start()

    @property
    def is_there(self) -> bool:
        """Whether `take` returns without waiting."""
        return self._starting is None or self._starting.done()

    def wait(self) -> None:
        """Waits until the cluster has started or has failed to; raises nothing."""
        if self._starting is not None:
            self._starting.exception()

    def take(self) -> Cluster | None:
        """Waits for the cluster and passes its ownership to the caller. None: it was taken before.

        Raises:
            Exception: what `start` raised.
        """
        # Ownership passes only once it is ready: a caller that is interrupted meanwhile still closes it.
        found = None if self._starting is None else self._starting.result()
        self._starting = None
        return found

    def close(self, *, interrupted: bool = False) -> None:
        """Closes the cluster unless it was taken. Safe to call twice.

        Args:
            interrupted: do not wait for a slow start; its thread closes the cluster when it can.
        """
        starting, self._starting = self._starting, None
        self._is_given_up = starting is not None
        try:
            if starting is not None:
                wait_or_abandon(starting, interrupted=interrupted, then=_close)
        finally:
            self._is_over.set()

    def __enter__(self) -> BackgroundCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(interrupted=is_interrupt(kind))

    def _check_wanted(self) -> None:
        # Connecting holds Python's lock, for seconds on a busy machine: nothing else would get to leave.
        if self._is_given_up:
            raise WorkerError("the program ended before it connected to Ray")

    def _run(self, start: Callable[[Callable[[], None]], Cluster], starting: Future[Cluster]) -> None:
        try:
            starting.set_result(start(self._check_wanted))
        except BaseException as error:
            starting.set_exception(error)
        # Linux ends what was asked to end with its parent when the parent's thread ends: Ray's daemons would go.
        self._is_over.wait()


def _close(started: Future[Cluster]) -> None:
    if started.exception() is None:
        started.result().close(grace_s=0.0)
