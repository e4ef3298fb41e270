"""What a ShardingManager of somebody else's stands on: the default sync, and hosts as their protocols say."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
from sharding_cases import dim0_sharded, random_tensors, rollout_group, train_group, whole_target

import rlsdk.interfaces
from rlsdk.interfaces import (
    ReshardPlan,
    ShardingManager,
    SyncReport,
    WeightLayout,
    WeightSourceHost,
    WeightTargetHost,
)
from rlsdk.sharding import TRANSPORTS, plan_reshard
from rlsdk.testing.sharding import local_groups
from rlsdk.trainer.roles import hosts

SHAPES = {"layer": (6, 5), "norm": (5,)}


class Theirs(ShardingManager):
    """The two methods that a manager must have, and nothing else."""

    def plan(self, source: Sequence[WeightLayout], target: Sequence[WeightLayout]) -> ReshardPlan:
        return plan_reshard(source, target, bucket_bytes=self.bucket_bytes, transports=TRANSPORTS)

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        peers = dict(enumerate(self.train.peers()))
        arguments = [(part, peers, version, self.timeout_s) for part in plan.parts]
        receipts = self.rollout.run_each("pull_weights", arguments)
        return SyncReport(
            version=version, num_tensors=len(plan.tensors), num_bytes=plan.num_bytes, moved_bytes=plan.moved_bytes,
            changed_tensors=len(plan.tensors), seconds=0.0, receipts=tuple(receipts),
        )  # fmt: skip


def test_the_default_sync_brings_a_plain_managers_weights_to_every_replica() -> None:
    """It asked the rollout side for `weight_layout`, which only training ranks have."""
    tensors = random_tensors(SHAPES)
    train = train_group(tensors, dim0_sharded(SHAPES, 2))
    rollout = rollout_group([[whole_target(SHAPES, 0)], [whole_target(SHAPES, 1)]])
    report = Theirs(train, rollout).sync(3)
    assert [receipt.version for receipt in report.receipts] == [3, 3]
    for host in rollout.hosts:
        served = {name: tensor for name, _, tensor in host.engine.served}
        assert served.keys() == tensors.keys()
        assert all((served[name] == tensors[name]).all() for name in tensors)


@pytest.mark.parametrize(
    ("protocol", "served_by"),
    [
        (WeightSourceHost, [hosts.TrainHost, local_groups.TrainHost]),
        (WeightTargetHost, [hosts.RolloutHost, local_groups.RolloutHost]),
    ],
)
def test_hosts_serve_what_their_protocol_says(protocol: type, served_by: list[type]) -> None:
    methods = [name for name, value in vars(protocol).items() if inspect.isfunction(value) and name[0] != "_"]
    assert len(methods) >= 2

    def parameters(owner: Any, method: str) -> list[tuple[str, Any]]:
        return [(p.name, p.kind) for p in inspect.signature(getattr(owner, method)).parameters.values()]

    for host in served_by:
        for method in methods:
            assert parameters(host, method) == parameters(protocol, method), f"{host}.{method}"


def test_a_manager_has_no_say_in_whose_memory_is_on_a_device() -> None:
    assert not hasattr(ShardingManager, "rollout_phase")
    assert not hasattr(rlsdk.interfaces, "Transport")
