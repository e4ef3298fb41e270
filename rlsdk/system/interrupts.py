"""Background work that an interrupted program (Ctrl-C, SIGTERM) abandons instead of waiting for its end."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

PATIENCE_S = 0.5
"""Longest that an interrupted program waits for one piece of background work."""
_abandoned: list[Future[Any]] = []


def is_interrupt(kind: type[BaseException] | None) -> bool:
    """Whether a block ends because the program was asked to end, and not by an error of its own."""
    return kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit)


def wait_or_abandon(
    work: Future[Any], *, interrupted: bool, then: Callable[[Future[Any]], None] = lambda _: None
) -> None:
    """Waits until background work ends; after an interrupt for `PATIENCE_S` at most, then abandons it.

    Args:
        work: runs on another thread, and cannot be cancelled.
        interrupted: the program was asked to end.
        then: called with `work` when it has ended; on the thread of `work` if that was abandoned.
    """
    try:
        work.exception(PATIENCE_S if interrupted else None)
    except TimeoutError:
        over: Future[None] = Future()
        _abandoned.append(over)

        def end(ended: Future[Any]) -> None:
            # `wait_for_abandoned` must wait for `then` too: a future wakes its waiters before it runs callbacks.
            try:
                then(ended)
            finally:
                over.set_result(None)

        work.add_done_callback(end)
    else:
        then(work)


def wait_for_abandoned() -> None:
    """Waits until all abandoned work has ended. Call it before starting the same work again."""
    while _abandoned:
        _abandoned.pop().exception()


def has_abandoned() -> bool:
    """Whether abandoned work still runs. A program that ends must then use `os._exit`, which does not wait for it."""
    return any(not work.done() for work in _abandoned)
