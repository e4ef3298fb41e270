"""Work that an interrupted program does not wait for: it runs on other threads and cannot be stopped midway."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

PATIENCE_S = 0.5
"""Longest that a program which was interrupted waits for one such piece of work."""
_left: list[Future[Any]] = []


def is_interrupt(kind: type[BaseException] | None) -> bool:
    """Whether a block ends because somebody wants the program to end now, and not by its own error."""
    return kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit)


def wait(work: Future[Any], *, interrupted: bool, then: Callable[[Future[Any]], None] = lambda _: None) -> None:
    """Waits for the end of some work, or leaves it to itself.

    Args:
        work: of another thread.
        interrupted: waits no longer than `PATIENCE_S`.
        then: called with it when it has ended, on its thread where it was left.
    """
    try:
        work.exception(PATIENCE_S if interrupted else None)
    except TimeoutError:
        over: Future[None] = Future()
        _left.append(over)

        def end(ended: Future[Any]) -> None:
            # Who settles waits for this as well: a future wakes who waits for it before it calls anything.
            try:
                then(ended)
            finally:
                over.set_result(None)

        work.add_done_callback(end)
    else:
        then(work)


def settle() -> None:
    """Waits for what was left: before a program that goes on begins the same again."""
    while _left:
        _left.pop().exception()


def is_left() -> bool:
    """Whether something is still under way. A program that ends now must not wait for it (`os._exit`)."""
    return any(not work.done() for work in _left)
