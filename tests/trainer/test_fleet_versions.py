"""A replica that is replaced while several versions of an adapter are served: it gets all of them, others go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from test_loop import closing_engines, config_of, model, registry, session_of

from rlsdk.interfaces import WorkerError
from rlsdk.registry import Registry
from rlsdk.testing.roles.in_process import start_in_process
from rlsdk.trainer.roles.fleet import Fleet
from rlsdk.trainer.roles.session import sharding_manager

__all__ = ["model", "registry"]

FLAGS = (
    "--model.lora.rank", "4", "--model.lora.sync", "adapter", "--schedule.max_staleness", "1",
    "--placement.preset", "disaggregated", "--placement.devices_per_node", "3", "--placement.devices", "{rollout: 2}",
)  # fmt: skip


class Ranks:
    """The ranks of a group, one of which can be replaced."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def future(self, rank: int, method: str, *args: Any) -> Future[Any]:
        found: Future[Any] = self.group.future(rank, method, *args)
        return found

    def peers(self) -> Any:
        return self.group.peers()

    def death(self, rank: int) -> BaseException | None:
        return None


class Replacing:
    """A cluster that puts another host in the place of a rank's."""

    def __init__(self, group: Any, fresh: Any) -> None:
        self.group, self.fresh = group, fresh

    def restart(self, role: str, rank: int) -> None:
        self.group.hosts[rank] = self.fresh.hosts[0]
        self.group._threads[rank], self.group._sequences[rank] = self.fresh._threads[0], self.fresh._sequences[0]


@pytest.fixture
def fleet(model: str, registry: Registry) -> Iterator[Fleet]:
    config = config_of(model, registry, 2, *FLAGS)
    with closing_engines(session_of(config, registry, replicas=2)) as session:
        spare = start_in_process(session.rollout.role, registry, ranks=1)
        group: Any = session.rollout.group
        yield Fleet(
            session, Ranks(group), Replacing(group, spare.group),
            lambda rollout: sharding_manager(config.sharding, registry, session.actor, rollout, timeout_s=60.0),
            max_restarts=3, keeps_copy=True, drains=False, timeout_s=60.0, notice=lambda text: None, num_versions=2,
            dead_daemon=lambda: None,
        )  # fmt: skip


def engines_of(fleet: Fleet) -> list[Any]:
    return [host.engine.engine for host in fleet._session.rollout.group.hosts]  # type: ignore[attr-defined]


def publish(fleet: Fleet, version: int) -> int:
    """Publishes an adapter of other values; returns the bytes of the weights below it."""
    actor: Any = fleet._session.actor.group
    with torch.no_grad():
        for values in actor.hosts[0].engine.engine.adapter.parameters.values():
            values += 0.01 * (version + 1)
    fleet.snapshot()
    return fleet.sync(version, expect_change=version > 0).base_bytes or 0


def kept(engine: Any) -> dict[int, dict[str, torch.Tensor]]:
    return {version: lane.values for version, lane in engine.versions.kept.items()}


@pytest.mark.parametrize("is_copied", [False, True], ids=["between publishes", "before a publish"])
def test_a_new_replica_gets_every_version_and_no_other_gets_the_weights_again(fleet: Fleet, is_copied: bool) -> None:
    assert publish(fleet, 0) > 0
    assert publish(fleet, 1) == 0
    old = engines_of(fleet)[0]
    if is_copied:
        fleet.snapshot()
    fleet._lost(1, fleet.health[1].life, WorkerError("rank 1 died"))
    deadline = time.monotonic() + 60
    while not fleet.health[1].serves and time.monotonic() < deadline:
        time.sleep(0.05)
    assert fleet.health[1].serves
    new = engines_of(fleet)[1]
    wanted = [1] if is_copied else [0, 1]
    assert list(kept(new)) == wanted, "oldest first"
    for version in wanted:
        for name, values in kept(new)[version].items():
            assert torch.equal(values, kept(old)[version][name]), (version, name)
    assert fleet.sync(2, expect_change=False).base_bytes == 0 if is_copied else publish(fleet, 2) == 0
    assert list(kept(old)) == list(kept(new)) == [1, 2]
