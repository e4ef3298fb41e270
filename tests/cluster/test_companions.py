"""Processes that a worker starts in its own placement group, for engines whose replica spans nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest

from rlsdk.cluster import Cluster
from rlsdk.interfaces import BatchError, WorkerError

StartCluster = Callable[[int], Cluster]


def test_a_companion_lives_in_a_bundle_of_its_worker_and_ends_with_it(own_cluster: StartCluster) -> None:
    cluster = own_cluster(2)
    group = cluster.create_group("victim", "cluster_hosts:CompanyHost")
    (first, pid, devices), (second, other, _) = group.run_each("start", [(1, "x"), (0, "y")], 120)
    assert (first, second) == ("x", "y")
    assert len({os.getpid(), pid, other, *group.run("pid")}) == 5
    assert not devices, "the devices of its node are for the engine to choose"
    assert set(group.run("address")) == {group.contexts[0].node.rpartition("/")[2]}
    with pytest.raises(BatchError, match="a buddy's error"):
        group.run("ask", "fail")
    with pytest.raises(WorkerError, match=r"cluster_hosts:Buddy in bundle . is gone"):
        group.run("ask", "die")
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(60)
    (_, pid, _), _ = group.run_each("start", [(1, "x"), (0, "y")], 120)
    process = psutil.Process(pid)
    os.kill(group.run("pid")[0], 9)
    deadline = time.monotonic() + 30
    while process.is_running() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not process.is_running(), "nobody would ever end it"


def test_a_companion_that_cannot_be_made_says_why(own_cluster: StartCluster) -> None:
    group = own_cluster(1).create_group("victim", "cluster_hosts:CompanyHost")
    with pytest.raises(BatchError, match="this buddy does not come"):
        group.run("start", 0, "refused", timeout_s=120)
