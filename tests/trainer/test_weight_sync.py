"""Weights from one worker to another as a run moves them: by every transport, and by somebody else's manager."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rlsdk.config import RunConfig, load_config
from rlsdk.interfaces import (
    ConfigError,
    LayoutError,
    RegisterComponent,
    ReshardPlan,
    ShardingManager,
    SyncReport,
    WeightLayout,
    hookimpl,
)
from rlsdk.interfaces.settings import FORMER_TRANSPORTS
from rlsdk.registry import Registry
from rlsdk.sharding import TRANSPORTS, GenericShardingManager, plan_reshard
from rlsdk.sharding.transports.table import named_transports
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.trainer.roles.devices import start_cluster
from rlsdk.trainer.roles.role_group import RoleGroup
from rlsdk.trainer.roles.session import sharding_manager, start_role
from rlsdk.trainer.runs.prepare import PreparedRun

BETWEEN_PROCESSES = ["auto", "ring", "object_store", "process_group"]


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover({})


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, registry: Registry) -> RunConfig:
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    arguments = ["--model", str(model), "--placement.preset", "disaggregated", "--placement.devices_per_node", "2"]
    return load_config([], [*arguments, "--sharding.bucket_mb", "1"], registry)


@pytest.fixture(scope="module")
def roles(
    config: RunConfig, registry: Registry, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RoleGroup, RoleGroup]]:
    """An actor and a rollout engine, each in a worker of its own."""
    folder = tmp_path_factory.mktemp("run")
    run = PreparedRun.of(config, registry, "cpu")
    with start_cluster(run.table, registry, config, run.placement, run_dir=folder) as cluster:
        actor, rollout = (start_role(role, registry, cluster) for role in run.table)
        yield actor, rollout


def manager_of(config: RunConfig, registry: Registry, roles: tuple[RoleGroup, RoleGroup]) -> ShardingManager:
    return sharding_manager(config.sharding, registry, *roles, timeout_s=60.0)


def with_transport(config: RunConfig, name: str) -> RunConfig:
    return config.model_copy(update={"sharding": config.sharding.model_copy(update={"transport": name})})


@pytest.mark.parametrize("name", BETWEEN_PROCESSES)
def test_every_transport_brings_weights_to_an_engine_that_has_none(
    config: RunConfig, registry: Registry, roles: tuple[RoleGroup, RoleGroup], name: str
) -> None:
    _, rollout = roles
    rollout.run("sleep", 2)
    rollout.run("wake", ("weights", "kv_cache"))
    manager = manager_of(with_transport(config, name), registry, roles)
    assert isinstance(manager, GenericShardingManager)
    ends = manager.ends()
    plan = manager.plan(ends.source, ends.target)
    assert {bucket.transport for bucket in plan.buckets} == {"ring" if name == "auto" else name}
    for version in (1, 2):
        report = manager.sync_weights(plan, version, expect_change=False)
        assert report.receipts[0].version == version
        assert report.transports == ("ring" if name == "auto" else name,)
        assert report.moved_bytes == report.lower_bound_bytes == report.num_bytes > 0


def test_a_transport_that_does_not_reach_is_refused_with_the_setting_to_change(
    config: RunConfig, registry: Registry, roles: tuple[RoleGroup, RoleGroup]
) -> None:
    manager = manager_of(with_transport(config, "in_process"), registry, roles)
    ends = manager.ends()
    with pytest.raises(LayoutError, match=r"no transport reaches .* tried: \['in_process'\]; sharding.transport: auto"):
        manager.plan(ends.source, ends.target)


class Theirs(ShardingManager):
    """Somebody else's: plans and moves by itself, and is asked for a sync by the interface's own default."""

    def plan(self, source: Sequence[WeightLayout], target: Sequence[WeightLayout]) -> ReshardPlan:
        return plan_reshard(source, target, bucket_bytes=self.bucket_bytes, transports=TRANSPORTS)

    def sync_weights(self, plan: ReshardPlan, version: int, *, expect_change: bool | None = None) -> SyncReport:
        peers = dict(enumerate(self.train.peers()))
        (receipt,) = self.rollout.run_each("pull_weights", [(plan.parts[0], peers, version, self.timeout_s)])
        return SyncReport(
            version=version,
            num_tensors=receipt.num_tensors,
            num_bytes=plan.num_bytes,
            moved_bytes=plan.moved_bytes,
            changed_tensors=receipt.num_tensors,
            seconds=receipt.seconds,
            receipts=(receipt,),
        )


class TheirPlugin:
    @hookimpl
    def rlsdk_register_sharding_managers(self, register: RegisterComponent) -> None:
        register("torch+transformers", Theirs)


def test_a_manager_that_somebody_registered_for_the_pair_serves_it_and_the_generic_one_can_be_named(
    config: RunConfig, roles: tuple[RoleGroup, RoleGroup]
) -> None:
    registry = Registry.discover({})
    registry.register_module(TheirPlugin(), distribution="theirs", version="1")
    manager = manager_of(config, registry, roles)
    assert type(manager) is Theirs
    assert manager.bucket_bytes == 1 << 20
    served = manager.sync(9).receipts[0].fingerprints
    named = config.model_copy(update={"sharding": config.sharding.model_copy(update={"manager": "*+*"})})
    generic = manager_of(named, registry, roles)
    assert type(generic) is GenericShardingManager
    assert generic.sync(10).receipts[0].fingerprints == served


def test_the_setting_knows_every_transport_and_suggests_the_nearest() -> None:
    field = RunConfig.model_fields["sharding"].annotation
    assert field is not None
    known = field.model_fields["transport"].annotation.__args__
    assert set(known) - {"auto"} == {transport.name for transport in TRANSPORTS}


@pytest.mark.parametrize("former", FORMER_TRANSPORTS)
def test_a_former_name_is_read_as_the_transport_that_replaces_it(
    tmp_path: Path, registry: Registry, former: str
) -> None:
    now = FORMER_TRANSPORTS[former]
    with pytest.warns(FutureWarning, match=rf"'{former}' is now '{now}'; the old name goes with interface 2\.2"):
        config = load_config([], ["--model", str(tmp_path), "--sharding.transport", former], registry)
    assert config.sharding.transport == now
    with pytest.warns(FutureWarning, match="is now"):
        assert [transport.name for transport in named_transports([former, now])] == [now]


def test_a_misspelt_transport_is_refused_with_the_nearest_name(tmp_path: Path, registry: Registry) -> None:
    with pytest.raises(ConfigError, match=r"(?s)sharding\.transport.*object_stor.*object_store"):
        load_config([], ["--model", str(tmp_path), "--sharding.transport", "object_stor"], registry)
