"""Writes a checkpoint in the background: one at a time, atomically."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundWork:
    """Runs one function at a time on a thread; `wait` raises its exception."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether no work is running."""
        return self._thread is None or not self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Starts the work; earlier work must have been waited for."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._do, args=(work,), name="rlsdk-save", daemon=True)
        self._thread.start()

    def wait(self) -> bool:
        """Waits for the running work; False if there was none.

        Raises:
            BaseException: what the work raised.
        """
        if self._thread is None:
            return False
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
