"""A wait for a future that looks after what the future needs, once a second."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

import pytest

from rlsdk.interfaces import DeadlineError
from rlsdk.kit.ranks import waiting
from rlsdk.kit.ranks.waiting import result_while


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LOOK_S", 0.01)


def at_look(number: int, act: Callable[[], object]) -> Callable[[], None]:
    """Acts at this look, counted from 1; the looks before do nothing."""
    looks = [0]

    def look() -> None:
        looks[0] += 1
        if looks[0] == number:
            act()

    return look


@pytest.mark.parametrize("timeout_s", [60.0, math.inf])
def test_the_result_comes_whenever_it_is_there(timeout_s: float) -> None:
    future: Future[int] = Future()
    assert result_while(future, timeout_s, at_look(3, lambda: future.set_result(7))) == 7
    assert result_while(future, 0.0, lambda: pytest.fail("it was done")) == 7


def test_what_the_future_raises_comes_out_even_if_it_is_a_timeout() -> None:
    future: Future[int] = Future()
    own = TimeoutError("of the work itself")
    with pytest.raises(TimeoutError, match="of the work itself"):
        result_while(future, 60.0, at_look(2, lambda: future.set_exception(own)), late=lambda: DeadlineError("late"))


def test_what_a_look_finds_ends_the_wait_and_the_work() -> None:
    future: Future[int] = Future()

    def dead() -> None:
        raise DeadlineError("the process is gone")

    with pytest.raises(DeadlineError, match="gone"):
        result_while(future, math.inf, at_look(2, dead))
    assert future.cancelled()


@pytest.mark.parametrize("timeout_s", [0.0, 0.05])
def test_a_wait_that_takes_too_long_is_the_error_that_was_asked_for(timeout_s: float) -> None:
    future: Future[int] = Future()
    began = time.monotonic()
    with pytest.raises(TimeoutError) as plain:
        result_while(future, timeout_s, lambda: None)
    assert timeout_s <= time.monotonic() - began
    assert type(plain.value) is TimeoutError
    assert future.cancelled()
    with pytest.raises(DeadlineError, match="no answer within"):
        result_while(Future[int](), timeout_s, lambda: None, late=lambda: DeadlineError("no answer within"))


def test_why_nothing_comes_is_said_rather_than_that_time_is_over() -> None:
    def dead() -> None:
        raise DeadlineError("the process is gone")

    with pytest.raises(DeadlineError, match="gone"):
        result_while(Future[int](), 0.0, dead)


def test_the_limit_counts_from_the_last_sign_of_progress() -> None:
    future: Future[str] = Future()
    # Twenty looks take four times the limit, and signs come all the while.
    assert result_while(future, 0.05, at_look(20, lambda: future.set_result("done")), idle_s=lambda: 0.0) == "done"
    idle: Future[str] = Future()
    # A process that was idle before the wait began has the whole limit, too.
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        result_while(idle, 0.05, lambda: None, idle_s=lambda: 1000.0)
    assert time.monotonic() - began >= 0.05


class JustLate(Future[int]):
    """Done between a wait that was in vain and the look at whether it is done."""

    def result(self, timeout: float | None = None) -> int:
        if self.done():
            return super().result(timeout)
        self.set_result(5)
        raise TimeoutError


def test_a_result_that_comes_just_after_the_time_counts() -> None:
    assert result_while(JustLate(), 0.0, lambda: pytest.fail("it is done")) == 5


def test_a_coroutine_on_another_loop_is_cancelled_with_the_wait() -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    ended = threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    try:
        future = asyncio.run_coroutine_threadsafe(work(), loop)
        with pytest.raises(TimeoutError):
            result_while(future, 0.2, lambda: None)
        assert ended.wait(30)
        with pytest.raises(CancelledError):
            future.result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
