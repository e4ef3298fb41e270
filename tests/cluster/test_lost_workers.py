"""What a session that ended was lost by. Starts no Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from rlsdk.cluster import Cluster, cluster
from rlsdk.cluster.pools import WorkerPools


@dataclass
class Worker:
    """A process that is not up yet, and may have died on the way."""

    error: BaseException | None
    info: None = None

    def death(self) -> BaseException | None:
        return self.error

    def where(self) -> str:
        return "pool 'actor' device 0, before it was ready"


@pytest.mark.parametrize("error", [RuntimeError("killed"), None])
def test_a_worker_that_died_on_its_way_up_is_a_lost_process(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    """A training process that was killed while a session was made anew ended the command."""
    monkeypatch.setattr(cluster, "dead_daemon", lambda: None)
    pools: Any = object.__new__(WorkerPools)
    pools._workers = {"actor": [Worker(None)], "rollout": [Worker(error)]}
    found: Any = object.__new__(Cluster)
    found._pools = pools
    assert found.find_lost(0.0) == ("pool 'actor' device 0, before it was ready" if error else None)
