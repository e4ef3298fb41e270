"""Five roles of real engines in this process: started, synced, trained, saved and restored by the table alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from rlsdk.algorithms import SftObjective, loss_weights
from rlsdk.config import Role, RunConfig, load_config
from rlsdk.interfaces import Batch, CheckpointError, ConfigError, ObjectiveResult, RlsdkError
from rlsdk.registry import Registry
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.roles.in_process import InProcessStore, start_in_process
from rlsdk.trainer.checkpoints.checkpoint import CheckpointStore
from rlsdk.trainer.learner.mini_batches import make_sft_batch
from rlsdk.trainer.roles.device_turns import DeviceTurns, shared_pools
from rlsdk.trainer.roles.placement import placement_of, roles
from rlsdk.trainer.roles.role_group import RoleGroup
from rlsdk.trainer.roles.session import Session, sharding_manager, start_roles


class ValueLoss:
    """Pulls every value to one."""

    outputs = ("values",)

    def __call__(self, outputs: Mapping[str, torch.Tensor], batch: Batch) -> ObjectiveResult:
        return ObjectiveResult(loss=(batch["loss_weight"] * (outputs["values"] - 1.0) ** 2).sum())


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover({"RLSDK_PLUGINS": "rlsdk"})


@pytest.fixture(scope="module")
def config(registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    path = str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))
    flags = ["--model", path, "--algorithm.advantage", "gae", "--algorithm.kl_coef", "0.1", "--train.optim.lr", "1e-3",
             "--reward_models", f"[{{path: {path}, name: good}}]"]  # fmt: skip
    return load_config([], flags, registry)


def session_of(config: RunConfig, registry: Registry, seen: list[str] | None = None) -> Session:
    """On one device that all take turns on, as on a GPU."""
    table = roles(config, "cpu")
    placement = placement_of(config.placement, [role.name for role in table], "cpu")
    turns = DeviceTurns(shared=shared_pools(placement, forced=True))

    def build(role: Role) -> RoleGroup:
        away = all(not turns.on_device(name) for name in seen or ())
        assert away, f"{seen} hold memory while {role.name} is built"
        if seen is not None:
            seen.append(role.name)
        return start_in_process(role, registry)

    groups = start_roles(table, build, turns)
    manager = sharding_manager(config.sharding, registry, groups["actor"], groups["rollout"], timeout_s=60.0)
    return Session(roles=groups, turns=turns, cluster=InProcessStore(), manager=manager)


def step(session: Session, version: int) -> list[float]:
    """Weights to the rollout engine, a pass of every frozen model, an update of every trained one."""
    batch = make_sft_batch([[1, 2], [3, 4]], [[5, 6], [7]])
    batch = batch.with_tokens(loss_weight=loss_weights(batch))
    with session.turns.rollout(lambda: session.weights().sync(version)) as report:
        assert report.version == version
    for name, output in (("ref", "log_probs"), ("reward.good", "scores"), ("critic", "values")):
        with session.turns.using(name):
            answer = session.roles[name].run("forward", batch, {output: output})
        assert torch.isfinite(answer[output]).all()
    losses = []
    for group, objective in ((session["critic"], ValueLoss()), (session.actor, SftObjective())):
        assert group is not None
        with session.turns.using(group.name, training=True):
            result = group.run("update", batch, objective)
        losses.append(result.update.loss)
    return losses


def test_rollout_engines_are_built_last_on_an_empty_device(config: RunConfig, registry: Registry) -> None:
    seen: list[str] = []
    session = session_of(config, registry, seen)
    assert seen == ["actor", "ref", "critic", "reward.good", "rollout"]
    assert list(session.roles) == ["actor", "rollout", "ref", "critic", "reward.good"]
    assert list(session.trained) == ["actor", "critic"]
    with pytest.raises(ConfigError, match=r"no role 'reward.god'; did you mean 'reward.good'"):
        session["reward.god"]
    with pytest.raises(RlsdkError, match="offloaded"):
        session.actor.run("forward", make_sft_batch([[1]], [[2]]), {"log_probs": "x"})


def test_a_restored_session_goes_on_number_for_number(config: RunConfig, registry: Registry, tmp_path: Path) -> None:
    session = session_of(config, registry)
    for version in range(2):
        step(session, version)
    session.save_roles(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["actor", "critic"]
    expected = [step(session, version) for version in (2, 3)]
    assert expected[1][0] < expected[0][0]
    assert expected[1][1] < expected[0][1]
    other = session_of(config, registry)
    assert other.turns.on_device("rollout")
    other.load_roles(tmp_path)  # Moments come while the rollout engine is awake: it gives way.
    assert not other.turns.on_device("rollout")
    assert [step(other, version) for version in (2, 3)] == expected


def test_a_checkpoint_without_a_role_says_which_is_missing(
    config: RunConfig, registry: Registry, tmp_path: Path
) -> None:
    session = session_of(config, registry)
    with pytest.raises(CheckpointError, match=r"has no actor/.* It holds \[\]"):
        session.load_roles(tmp_path)


def test_a_checkpoint_that_an_engine_refuses_is_named_with_whole_ones_beside_it(
    config: RunConfig, registry: Registry, tmp_path: Path
) -> None:
    session = session_of(config, registry)
    store = CheckpointStore(tmp_path, keep=3)
    with store.write(1, {}) as draft:
        (draft / "weights").touch()
    with store.write(2, {}) as draft:
        session.save_roles(draft)
        (draft / "actor" / "state.safetensors").write_bytes(b"sealed, and nothing that the engine reads")
    with pytest.raises(CheckpointError, match=r"complete checkpoints in this folder: .*step_00000001 \(take one with"):
        session.load_roles(store.path_of(2))


def test_a_session_that_only_trains_refuses_to_sample(config: RunConfig, registry: Registry) -> None:
    (role,) = roles(config, "cpu", needed=["actor"])
    turns = DeviceTurns()
    session = Session(
        roles=start_roles([role], lambda role: start_in_process(role, registry), turns),
        turns=turns,
        cluster=InProcessStore(),
    )
    with pytest.raises(ConfigError, match=r"no rollout engine, only \['actor'\]"):
        session.weights()
