"""What the controller says when a worker fails, dies or is silent, and how soon."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import pytest

from rlsdk.cluster import Cluster, WorkerGroup
from rlsdk.interfaces import BatchError, ConfigError, DeadlineError, WorkerError

MakeGroup = Callable[..., WorkerGroup]
StartCluster = Callable[[int], Cluster]


@pytest.fixture(scope="module")
def fragile(make_group: MakeGroup) -> WorkerGroup:
    return make_group("FragileHost")


def test_an_error_of_ours_keeps_its_class_and_says_where_it_comes_from(fragile: WorkerGroup) -> None:
    with pytest.raises(BatchError, match="does not like this batch") as caught:
        fragile.run("raise_ours")
    note = caught.value.__notes__[0]
    assert f"{fragile.role} rank" in note
    assert "pid" in note
    assert "in raise_ours" in str(caught.value.__cause__)


def test_a_stranger_s_error_becomes_a_worker_error_with_its_traceback(fragile: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match=r"rank \d .* raised ZeroDivisionError: a stranger's error") as caught:
        fragile.run("raise_theirs")
    assert "cluster_hosts.py" in str(caught.value.__cause__)


def test_a_host_that_cannot_be_built_says_why(make_group: MakeGroup) -> None:
    with pytest.raises(WorkerError, match=r"building .*UnbuildableHost.* raised ValueError: rank \d cannot be built"):
        make_group("UnbuildableHost")
    with pytest.raises(WorkerError, match="has no attribute 'NoSuchHost'"):
        make_group("NoSuchHost")


def test_a_silent_rank_is_named_when_the_deadline_passes(own_cluster: StartCluster) -> None:
    group = own_cluster(2).create_group("victim", "cluster_hosts:FragileHost")
    group.run("ranks")
    pending = group.submit("hang_on", 1, 6.0)
    text = r"no answer within 2 s in victim\.hang_on from victim rank 1 \(node .* of 2 calls 1 were answered"
    with pytest.raises(DeadlineError, match=text):
        pending.result(2.0)
    assert pending.result(60) == [0, 1], "the call goes on, and can be waited for again"


def test_one_rank_that_raises_is_not_hidden_by_others_that_hang(own_cluster: StartCluster) -> None:
    group = own_cluster(2).create_group("victim", "cluster_hosts:FragileHost")
    start = time.monotonic()
    with pytest.raises(BatchError, match="only me"):
        group.run("raise_on", 1)
    assert time.monotonic() - start < 40


def test_a_killed_worker_is_reported_with_its_last_words(own_cluster: StartCluster) -> None:
    group = own_cluster(2).create_group("victim", "cluster_hosts:FragileHost")
    pids = group.run("pid")
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        group.run("die", 1)
    assert time.monotonic() - start < 40
    text = str(caught.value)
    assert f"victim rank 1 died on node {group.contexts[1].node}, pid {pids[1]} while in victim.die" in text
    assert "  these are my last words" in text
    with pytest.raises(WorkerError, match="victim rank 1 died"):
        group.run("ranks")


def test_a_death_ends_the_wait_for_ranks_that_may_hang_because_of_it(own_cluster: StartCluster) -> None:
    group = own_cluster(2).create_group("victim", "cluster_hosts:FragileHost")
    group.submit("die", 1)
    start = time.monotonic()
    with pytest.raises(WorkerError, match="victim rank 1 died"):
        group.run("rank_zero_hangs")
    assert time.monotonic() - start < 40


def test_a_peer_that_is_gone_is_a_worker_error(own_cluster: StartCluster) -> None:
    group = own_cluster(2).create_group("victim", "cluster_hosts:FragileHost")
    victim = psutil.Process(group.run("pid")[1])
    group.submit("die", 1)
    victim.wait(30)
    with pytest.raises(WorkerError, match=r"victim rank 1 on node .* could not answer 'where'"):
        group.peers()[1].call("where", timeout_s=5)


def test_a_peer_that_does_not_answer_is_a_deadline_error(group: WorkerGroup) -> None:
    with pytest.raises(DeadlineError, match=r"did not answer 'slow_where' within 0\.2 s"):
        group.peers()[0].call("slow_where", timeout_s=0.2)


def test_closing_ends_workers_that_hang(own_cluster: StartCluster) -> None:
    cluster = own_cluster(1)
    group = cluster.create_group("victim", "cluster_hosts:FragileHost")
    group.submit("hang_on", 0, 60.0)
    start = time.monotonic()
    cluster.close(grace_s=0.5)
    cluster.close()
    assert time.monotonic() - start < 40
    with pytest.raises(WorkerError):
        group.run("ranks")


def test_a_role_that_fails_to_build_can_be_built_again(own_cluster: StartCluster) -> None:
    cluster = own_cluster(1)
    with pytest.raises(WorkerError):
        cluster.create_group("victim", "cluster_hosts:UnbuildableHost")
    with pytest.raises(ConfigError, match=r"expected 'package\.module:Class'"):
        cluster.create_group("victim", "cluster_hosts.EchoHost")
    assert cluster.create_group("victim", "cluster_hosts:EchoHost").run("ranks") == [0]
