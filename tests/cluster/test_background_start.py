"""A cluster that is begun before it is needed: taken once, closed where nobody took it, its error told."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import cast

import pytest

from rlsdk.cluster import BackgroundCluster, Cluster
from rlsdk.cluster.ray_cluster.local import own_signal_handlers
from rlsdk.interfaces import PlacementError
from rlsdk.system import interrupts

Wait = Callable[[], None]


class FakeCluster:
    """Knows whether it was closed. Nothing here needs more of a cluster."""

    closed = 0
    takes_s = 0.0

    def close(self, *, grace_s: float) -> None:
        time.sleep(self.takes_s)
        self.closed += 1


def made(cluster: FakeCluster) -> Cluster:
    return cast(Cluster, cluster)


def test_it_starts_beside_its_caller_and_is_taken_once() -> None:
    cluster, go_on = FakeCluster(), threading.Event()

    def start(before_connect: Wait) -> Cluster:
        assert go_on.wait(30)
        return made(cluster)

    with BackgroundCluster(start) as ahead:
        assert not ahead.is_there
        go_on.set()
        assert ahead.take() is made(cluster)
        assert ahead.is_there
        assert ahead.take() is None, "the next session starts its own"
    assert cluster.closed == 0, "who took it closes it"


def test_one_that_nobody_took_is_closed() -> None:
    cluster = FakeCluster()
    with pytest.raises(KeyboardInterrupt), BackgroundCluster(lambda _: made(cluster)):
        raise KeyboardInterrupt
    assert cluster.closed == 1


def test_why_it_did_not_start_is_told_to_who_takes_it_and_hides_no_other_error() -> None:
    def start(before_connect: Wait) -> Cluster:
        raise PlacementError("asked for 8 GPUs, there is 1")

    with pytest.raises(PlacementError, match="there is 1"), BackgroundCluster(start) as ahead:
        ahead.take()
    with pytest.raises(ValueError, match="of the caller"), BackgroundCluster(start):
        raise ValueError("of the caller")


def test_a_program_that_ends_before_it_is_connected_does_not_connect() -> None:
    """Connecting holds Python's lock: on a busy machine Ctrl-C was heard seven seconds later."""
    daemons, ends, connected = threading.Event(), threading.Event(), threading.Event()

    def start(before_connect: Wait) -> Cluster:
        daemons.set()
        assert ends.wait(30)
        time.sleep(0.1)
        before_connect()
        connected.set()
        return made(FakeCluster())

    def program() -> None:
        with BackgroundCluster(start):
            assert daemons.wait(30)
            ends.set()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        program()
    interrupts.wait_for_abandoned()
    assert not connected.is_set()


def test_who_waits_goes_on_when_the_cluster_is_there_or_cannot_be() -> None:
    cluster, go_on = FakeCluster(), threading.Event()

    def start(before_connect: Wait) -> Cluster:
        assert go_on.wait(30)
        before_connect()
        return made(cluster)

    def fail(before_connect: Wait) -> Cluster:
        raise PlacementError("asked for 8 GPUs, there is 1")

    with BackgroundCluster(start) as ahead:
        threading.Timer(0.2, go_on.set).start()
        ahead.wait()
        assert ahead.is_there
        ahead.take()
        ahead.wait()
    with BackgroundCluster(fail) as ahead:
        ahead.wait()
        with pytest.raises(PlacementError, match="there is 1"):
            ahead.take()


def test_a_handler_that_is_set_below_python_on_its_thread_gives_way_to_the_program_s() -> None:
    """Ray sets one that takes SIGTERM for a crash: it printed a stack, and ended a run that should have been saved."""
    getsig, setsig = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
    getsig.restype, setsig.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    seen: list[int] = []

    def start(before_connect: Wait) -> Cluster:
        with own_signal_handlers():
            setsig(signal.SIGTERM, 1)  # SIG_IGN
        return made(FakeCluster())

    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        ours = getsig(signal.SIGTERM)
        with BackgroundCluster(start) as ahead:
            ahead.take()
        assert getsig(signal.SIGTERM) == ours
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_interrupted_program_does_not_wait_for_a_slow_start_and_the_next_one_does() -> None:
    cluster, next_one, go_on = FakeCluster(), FakeCluster(), threading.Event()
    cluster.takes_s = 0.5

    def start(before_connect: Wait) -> Cluster:
        assert go_on.wait(120)
        return made(cluster)

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), BackgroundCluster(start):
        raise KeyboardInterrupt
    assert time.monotonic() - began < 30, "and not as long as it takes to start"
    assert interrupts.has_abandoned()
    assert cluster.closed == 0
    threading.Timer(0.2, go_on.set).start()
    with BackgroundCluster(lambda _: made(next_one)) as ahead:  # waits: Ray is one for the whole process
        assert cluster.closed == 1
        assert not interrupts.has_abandoned()
        assert ahead.take() is made(next_one)


def test_who_is_interrupted_while_it_waits_for_its_cluster_still_closes_it() -> None:
    """In a notebook the next run would join a cluster that nobody owns, and find its devices taken."""
    cluster, go_on = FakeCluster(), threading.Event()

    def start(before_connect: Wait) -> Cluster:
        assert go_on.wait(60)
        return made(cluster)

    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt), BackgroundCluster(start) as ahead:
        ahead.take()
    assert interrupts.has_abandoned()
    go_on.set()
    interrupts.wait_for_abandoned()
    assert cluster.closed == 1
