"""A cluster that is begun before it is needed: taken once, closed where nobody took it, its error told."""

from __future__ import annotations

import threading
from typing import cast

import pytest

from rlsdk.cluster import Cluster, ClusterAhead
from rlsdk.interfaces import PlacementError


class FakeCluster:
    """Knows whether it was closed. Nothing here needs more of a cluster."""

    closed = 0

    def close(self, *, grace_s: float) -> None:
        self.closed += 1


def made(cluster: FakeCluster) -> Cluster:
    return cast(Cluster, cluster)


def test_it_starts_beside_its_caller_and_is_taken_once() -> None:
    cluster, go_on = FakeCluster(), threading.Event()

    def start() -> Cluster:
        assert go_on.wait(30)
        return made(cluster)

    with ClusterAhead(start) as ahead:
        assert not ahead.is_there
        go_on.set()
        assert ahead.take() is made(cluster)
        assert ahead.is_there
        assert ahead.take() is None, "the next session starts its own"
    assert cluster.closed == 0, "who took it closes it"


def test_one_that_nobody_took_is_closed() -> None:
    cluster = FakeCluster()
    with pytest.raises(KeyboardInterrupt), ClusterAhead(lambda: made(cluster)):
        raise KeyboardInterrupt
    assert cluster.closed == 1


def test_why_it_did_not_start_is_told_to_who_takes_it_and_hides_no_other_error() -> None:
    def start() -> Cluster:
        raise PlacementError("asked for 8 GPUs, there is 1")

    with pytest.raises(PlacementError, match="there is 1"), ClusterAhead(start) as ahead:
        ahead.take()
    with pytest.raises(ValueError, match="of the caller"), ClusterAhead(start):
        raise ValueError("of the caller")
