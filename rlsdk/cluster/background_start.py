"""Starts a cluster in the background, before the program needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType

from rlsdk.cluster.cluster import Cluster
from rlsdk.interfaces import WorkerError
from rlsdk.kit.interrupts import is_interrupt, wait_for_abandoned, wait_or_abandon


class BackgroundCluster:
    """Starts the cluster on construction. Use it as a context manager around all use of the cluster: a cluster that was
    not taken is closed at the end."""

    def __init__(self, start: Callable[[Callable[[], None]], Cluster]) -> None:
        """Calls `start` on its own thread.

        Args:
            start: makes the cluster; its argument is a function to call before workers are started. Ray imports torch
                with the first worker, and of two threads that import torch at once, one gets a partial module.
        """
        wait_for_abandoned()  # Ray is one for the whole process
        # Here and not there: two imports at a time take turns, and Ray's daemons would be started late.
        import ray  # noqa: F401

        self._starting: Future[Cluster] | None = Future()
        self._may_import = threading.Event()
        self._is_over = threading.Event()
        self._is_given_up = False
        threading.Thread(
            target=self._run, args=(start, self._starting), name="rlsdk-cluster-start", daemon=True
        ).start()

    def imported(self) -> None:
        """Reports that this thread has imported torch, so that workers may be started."""
        self._may_import.set()

    @property
    def is_there(self) -> bool:
        """Whether `take` returns without waiting."""
        return self._starting is None or self._starting.done()

    def take(self) -> Cluster | None:
        """Waits for the cluster and passes its ownership to the caller. None: it was taken before.

        Raises:
            Exception: what `start` raised.
        """
        self.imported()
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
        self.imported()
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

    def _wait(self) -> None:
        self._may_import.wait()
        if self._is_given_up:
            raise WorkerError("the program ended before its workers were started")

    def _run(self, start: Callable[[Callable[[], None]], Cluster], starting: Future[Cluster]) -> None:
        try:
            starting.set_result(start(self._wait))
        except BaseException as error:
            starting.set_exception(error)
        # Linux ends what was asked to end with its parent when the parent's thread ends: Ray's daemons would go.
        self._is_over.wait()


def _close(started: Future[Cluster]) -> None:
    if started.exception() is None:
        started.result().close(grace_s=0.0)
