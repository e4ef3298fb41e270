"""The order in which one worker runs what it is sent."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from concurrent.futures import Future
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.cluster.workers.engine_thread import EngineThread


def held() -> Counter[str]:
    """How many threads and open files this process has."""
    return Counter(threads=threading.active_count(), files=len(os.listdir("/proc/self/fd")))


@given(st.permutations(range(12)))
def test_jobs_run_in_the_order_of_their_numbers_however_they_arrive(arrival: list[int]) -> None:
    engine, seen = EngineThread(), list[int]()
    futures = [engine.submit(number, partial(seen.append, number)) for number in arrival]
    for future in futures:
        future.result(60)
    assert seen == list(range(12))


def test_all_jobs_share_one_thread_and_one_event_loop() -> None:
    async def where() -> tuple[int, int]:
        return threading.get_ident(), id(asyncio.get_running_loop())

    engine = EngineThread()
    found = {engine.submit(number, where).result(60) for number in range(3)}
    assert len(found) == 1
    assert engine.submit(3, threading.get_ident).result(60) == engine.thread.ident


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), KeyboardInterrupt()])
def test_a_job_that_raises_does_not_stop_the_thread(error: BaseException) -> None:
    def fail() -> None:
        raise error

    engine = EngineThread()
    failed: Future[None] = engine.submit(0, fail)
    assert failed.exception(60) is error
    assert engine.submit(1, lambda: 5).result(60) == 5


def test_a_closed_thread_leaves_no_thread_and_no_open_file_and_takes_no_job() -> None:
    before = held()
    engine = EngineThread()
    left: Future[None] = engine.submit(0, lambda: asyncio.get_running_loop().create_task(asyncio.sleep(60)) and None)
    never: Future[None] = engine.submit(2, lambda: None)
    assert left.result(60) is None
    for _ in range(2):
        engine.close(5)
    assert never.cancelled()
    assert not engine.thread.is_alive()
    deadline = time.monotonic() + 30
    while held() - before and time.monotonic() < deadline:  # other threads of this process may open a file meanwhile
        time.sleep(0.05)
    assert not held() - before
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(1, lambda: None)
