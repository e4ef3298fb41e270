"""Starts a cluster in the background, before the program needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType

from rlsdk.cluster.cluster import Cluster
from rlsdk.interfaces import WorkerError
from rlsdk.kit.leaving import is_interrupt, settle, wait


class ClusterAhead:
    """Begins when it is made. Use it as a context manager around all that the cluster is used for: one that nobody took
    is closed at the end."""

    def __init__(self, start: Callable[[Callable[[], None]], Cluster]) -> None:
        """Calls `start` on its own thread.

        Args:
            start: makes the cluster; is given what to call before workers are started. Ray imports torch with the first
                of them, and two threads that import torch at a time get parts of it.
        """
        settle()  # Ray is one for the whole process
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
        """This thread has imported torch: workers may be started."""
        self._may_import.set()

    @property
    def is_there(self) -> bool:
        """`take` need not wait."""
        return self._starting is None or self._starting.done()

    def take(self) -> Cluster | None:
        """Waits for the cluster; from then on it is the caller's. None: it was taken before.

        Raises:
            Exception: what `start` raised.
        """
        self.imported()
        # It is the caller's once it is there: one who is interrupted meanwhile still closes it.
        found = None if self._starting is None else self._starting.result()
        self._starting = None
        return found

    def close(self, *, interrupted: bool = False) -> None:
        """Closes the cluster unless somebody has taken it. Safe to call twice.

        Args:
            interrupted: a start that takes long is left to its thread, which ends it when it can.
        """
        starting, self._starting = self._starting, None
        self._is_given_up = starting is not None
        self.imported()
        try:
            if starting is not None:
                wait(starting, interrupted=interrupted, then=_close)
        finally:
            self._is_over.set()

    def __enter__(self) -> ClusterAhead:
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
