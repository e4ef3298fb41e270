"""Writes a checkpoint in the background: one at a time, atomically."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundWork:
    """One piece of work at a time on a thread; what it raises is raised where it is waited for."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Nothing is under way."""
        return self._thread is None or not self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Begins it; what was begun before was waited for."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._do, args=(work,), name="rlsdk-save", daemon=True)
        self._thread.start()

    def wait(self) -> bool:
        """Waits for what is under way; False where nothing was.

        Raises:
            BaseException: what it raised.
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
