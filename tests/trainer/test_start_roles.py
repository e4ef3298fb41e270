"""In which order roles are started."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import cast

import pytest

from rlsdk.config import Role, load_config
from rlsdk.interfaces import WorkerError
from rlsdk.registry import Registry
from rlsdk.trainer.roles.device_turns import DeviceTurns
from rlsdk.trainer.roles.placement import roles
from rlsdk.trainer.roles.role_group import RoleGroup
from rlsdk.trainer.roles.session import start_roles


class NoTurns(DeviceTurns):
    """Nothing has memory."""

    def add(self, group: RoleGroup) -> None:
        """Knows none of them."""


@pytest.fixture(scope="module")
def table() -> list[Role]:
    registry = Registry.discover({"RLSDK_PLUGINS": "rlsdk"})
    config = load_config([], ["--model", "some/model", "--algorithm.kl_coef", "0.1"], registry)
    places = {"actor": "a", "ref": "b", "rollout": "b"}
    return [replace(role, pool=places[role.name]) for role in roles(config, "cpu")]


def test_pools_start_side_by_side_and_rollout_engines_of_a_pool_last(table: list[Role]) -> None:
    together, order = threading.Barrier(2, timeout=30), []

    def start(role: Role) -> RoleGroup:
        if role.name in ("actor", "ref"):
            together.wait()  # passes only where both are being started
        order.append(role.name)
        return cast(RoleGroup, role)

    found = start_roles(table, start, NoTurns(), at_once=True)
    assert list(found) == [role.name for role in table]
    assert order.index("ref") < order.index("rollout")


def test_the_first_pool_that_fails_is_told_while_others_still_start(table: list[Role]) -> None:
    released = threading.Event()

    def start(role: Role) -> RoleGroup:
        if role.pool == "b":
            raise WorkerError("no memory")
        assert released.wait(30)
        return cast(RoleGroup, role)

    try:
        with pytest.raises(WorkerError, match="no memory"):
            start_roles(table, start, NoTurns(), at_once=True)
    finally:
        released.set()
