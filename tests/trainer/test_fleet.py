"""Replicas that are lost together with a daemon of the cluster: nobody waits for processes that cannot be started."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlsdk.interfaces import WorkerError
from rlsdk.rollouts.client.health import State
from rlsdk.trainer.roles.fleet import Fleet
from rlsdk.trainer.roles.serving import ReplicasLostError

DEAD = "gcs_server, pid 7, killed by signal 9"


class Stuck:
    """A cluster whose daemon is gone: who asks it for a process waits."""

    def __init__(self) -> None:
        self.asked = 0
        self.goes_on = threading.Event()
        self.ended = threading.Event()

    def restart(self, role: str, rank: int) -> None:
        self.asked += 1
        self.goes_on.wait(30)
        self.ended.set()


def fleet_on(cluster: Stuck, dead: Callable[[], str | None], notices: list[str]) -> Fleet:
    session = SimpleNamespace(rollout=SimpleNamespace(name="rollout", backend="transformers", world_size=1))
    return Fleet(
        cast(Any, session), cast(Any, None), cluster, cast(Any, None), max_restarts=3, keeps_copy=False, drains=True,
        timeout_s=5, notice=notices.append, dead_daemon=dead,
    )  # fmt: skip


def revive(fleet: Fleet) -> None:
    asyncio.run(asyncio.wait_for(fleet.revive(0, 0, WorkerError("rollout rank 0 died")), 10))


def test_a_replica_that_was_lost_with_a_daemon_is_given_up_at_once() -> None:
    cluster, notices = Stuck(), list[str]()
    fleet = fleet_on(cluster, lambda: DEAD, notices)
    with pytest.raises(ReplicasLostError, match="gcs_server, pid 7"):
        revive(fleet)
    assert (cluster.asked, fleet.health[0].state, notices) == (0, State.RETIRED, [])


def test_a_daemon_that_dies_during_a_restart_ends_the_wait_for_it() -> None:
    cluster, notices = Stuck(), list[str]()
    fleet = fleet_on(cluster, lambda: DEAD if cluster.asked else None, notices)
    with pytest.raises(ReplicasLostError, match="gcs_server, pid 7"):
        revive(fleet)
    cluster.goes_on.set()
    assert cluster.ended.wait(60)
    fleet.close()
    assert (cluster.asked, fleet.health[0].state, fleet.restarts) == (1, State.RETIRED, 0)
    assert "is started again (1 of 3 in a row)" in notices[0]
