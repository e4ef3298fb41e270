"""Who has the memory of a device: which calls bring it about, in which order, and on a real engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.cluster import PlacementSpec, PoolSpec
from rlsdk.config import Role
from rlsdk.interfaces import (
    BackendKind,
    BackendSpec,
    Capability,
    ModelSpec,
    OptimSpec,
    RlsdkError,
    RolloutSpec,
    SyncReport,
    TrainSpec,
    WeightSyncError,
)
from rlsdk.trainer.roles.device_turns import DeviceTurns, shared_pools
from rlsdk.trainer.roles.memory_moves import CACHE, WEIGHTS, Move, RoleMemory, moves
from rlsdk.trainer.roles.role_group import RoleGroup

EVERYTHING = frozenset(("weights", "optimizer", "gradients", "kv_cache"))
REPORT = SyncReport(version=1, num_tensors=1, num_bytes=1, moved_bytes=1, changed_tensors=1, seconds=0.5,
                    stages_s={"pull": 0.5})  # fmt: skip
MEMORIES = st.builds(
    lambda kind, moves: RoleMemory(
        role="", is_rollout=kind == "rollout", is_trained=kind == "trained", can_offload=moves
    ),
    st.sampled_from(["rollout", "trained", "frozen"]),
    st.booleans(),
)


def named(drawn: Sequence[RoleMemory]) -> list[RoleMemory]:
    return [
        RoleMemory(role=f"r{at}", is_rollout=s.is_rollout, is_trained=s.is_trained, can_offload=s.can_offload)
        for at, s in enumerate(drawn)
    ]


def parts_of(memory: RoleMemory) -> st.SearchStrategy[frozenset[str]]:
    """What of a role may be on a device: no cache and nothing of an update without weights."""
    kept = st.sets(st.sampled_from(memory.parts)).map(
        lambda parts: frozenset(parts) if WEIGHTS in parts else frozenset()
    )
    return kept if memory.can_offload else st.just(frozenset(memory.parts))


@given(st.data())
def test_moves_reach_what_is_wanted_and_never_hold_more_than_before_or_after(data: st.DataObject) -> None:
    memories = named(data.draw(st.lists(MEMORIES, min_size=1, max_size=6)))
    here = {memory.role: data.draw(parts_of(memory)) for memory in memories}
    wanted = {memory.role: data.draw(parts_of(memory)) for memory in memories if data.draw(st.booleans())}
    now, arriving = dict(here), False
    for move in moves(memories, here, wanted):
        memory = next(memory for memory in memories if memory.role == move.role)
        before = now[move.role]
        assert memory.can_offload
        assert move.method in (("sleep", "wake") if memory.is_rollout else ("offload", "onload"))
        comes = move.method in ("wake", "onload")
        assert comes or not arriving, "something left after something had come"
        arriving |= comes
        assert (before < move.after) if comes else (move.after < before)
        if not isinstance(move.argument, int):
            assert frozenset(move.argument) == before ^ move.after
        assert not move.after or WEIGHTS in move.after
        now[move.role] = move.after
    for memory in memories:
        assert now[memory.role] == (wanted.get(memory.role, frozenset()) if memory.can_offload else here[memory.role])


class Recorder:
    """The ranks of a role that note what they are asked for, and refuse what a real engine would refuse."""

    def __init__(self, name: str, parts: frozenset[str], calls: list[str]) -> None:
        self.name, self.here, self.calls = name, parts, calls
        self.world_size = 1

    def run(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> None:
        self.calls.append(f"{method} {self.name} {' '.join(args[0]) if isinstance(args[0], tuple) else args[0]}")
        parts = frozenset(args[0]) if isinstance(args[0], tuple) else self.here
        if method in ("offload", "sleep"):
            assert parts <= self.here
            self.here -= parts
        else:
            assert not parts & self.here
            self.here |= parts


def role(name: str, pool: str = "all", *, trained: bool = False) -> Role:
    model = ModelSpec(path="m")
    if name.startswith("rollout"):
        return Role(name=name, kind=BackendKind.ROLLOUT, backend="b", spec=RolloutSpec(model=model), pool=pool)
    spec = TrainSpec(model=model, optim=OptimSpec() if trained else None)
    return Role(name=name, kind=BackendKind.TRAIN, backend="b", spec=spec, pool=pool)


def group_of(role: Role, calls: list[str], *, able: bool = True) -> RoleGroup:
    capability = Capability.SLEEP if role.is_rollout else Capability.OFFLOAD
    spec = BackendSpec(name="b", kind=role.kind, engine="m:E", capabilities=frozenset({capability} if able else set()))
    parts = frozenset(RoleMemory(role="", is_rollout=role.is_rollout, is_trained=role.is_trained).parts)
    group: Any = Recorder(role.name, parts, calls)
    return RoleGroup(role=role, spec=spec, group=group)


ROLES = [role("actor", trained=True), role("ref"), role("critic", trained=True), role("reward.a"), role("reward.b"),
         role("rollout")]  # fmt: skip


def turns_of(roles: Sequence[Role], shared: Sequence[str] = ("all",), unable: Sequence[str] = ()) -> Any:
    calls: list[str] = []
    turns = DeviceTurns(shared=shared)
    groups = {}
    for one in roles:
        turns.make_room(one.pool)
        groups[one.name] = group_of(one, calls, able=one.name not in unable)
        turns.add(groups[one.name])
    return turns, groups, calls


def test_five_roles_on_one_device_give_way_to_each_other_in_stages() -> None:
    turns, _, calls = turns_of(ROLES)
    # While the next is built, what was built before is off: the rollout engine measures an empty device.
    assert calls == [
        "offload actor optimizer gradients", "offload actor weights", "offload ref weights",
        "offload critic optimizer gradients", "offload critic weights", "offload reward.a weights",
        "offload reward.b weights",
    ]  # fmt: skip
    calls.clear()
    with turns.using("actor", training=True):  # A resumed run loads its moments before anything was sampled.
        assert turns.on_device("rollout") == frozenset()
    assert calls == ["sleep rollout 2", "onload actor weights", "onload actor optimizer gradients"]
    calls.clear()
    with turns.rollout(lambda: calls.append("sync") or REPORT) as report:
        calls.append("in")
        assert turns.on_device("rollout") == {WEIGHTS, CACHE}
    assert calls == [
        "offload actor optimizer gradients", "wake rollout weights", "sync", "offload actor weights",
        "wake rollout kv_cache", "in", "sleep rollout 2",
    ]  # fmt: skip
    assert list(report.stages_s) == [
        "offload actor optimizer", "wake rollout weights", "pull", "offload actor weights", "wake rollout kv_cache",
        "sleep rollout",
    ]  # fmt: skip
    calls.clear()
    for name in ("reward.a", "ref", "actor", "critic"):
        with turns.using(name) as stages:
            assert turns.on_device(name) == {WEIGHTS}
            assert all(not turns.on_device(other.name) for other in ROLES if other.name != name)
            assert f"onload {name} weights" in stages
    with turns.using("critic", training=True), turns.using("critic"):
        pass
    assert calls == [
        "onload reward.a weights", "offload reward.a weights", "onload ref weights", "offload ref weights",
        "onload actor weights", "offload actor weights", "onload critic weights", "onload critic optimizer gradients",
    ]  # fmt: skip


@given(
    st.sets(st.sampled_from([role.name for role in ROLES[1:-1]])),
    st.sets(st.sampled_from([role.name for role in ROLES])),
    st.dictionaries(st.sampled_from([role.name for role in ROLES]), st.sampled_from(["one", "two"])),
    st.lists(st.tuples(st.sampled_from([role.name for role in ROLES]), st.booleans()), max_size=12),
)
def test_whatever_the_roles_pools_and_order_each_use_has_its_own_and_nobody_elses(
    present: set[str], unable: set[str], pools: dict[str, str], uses: list[tuple[str, bool]]
) -> None:
    table = [
        Role(name=one.name, kind=one.kind, backend="b", spec=one.spec, pool=pools.get(one.name, "one"))
        for one in ROLES
        if one.name in present or one.name in ("actor", "rollout")
    ]
    shared = [pool for pool in ("one", "two") if sum(one.pool == pool for one in table) > 1]
    turns, groups, _ = turns_of(table, shared, sorted(unable))

    def check(pool: str, *users: str) -> None:
        for one in table:
            real = groups[one.name].group.here
            assert turns.on_device(one.name) == real
            if one.pool == pool and pool in shared and one.name not in users and one.name not in unable:
                assert real == frozenset()

    def sync() -> SyncReport:
        assert WEIGHTS in groups["actor"].group.here
        assert WEIGHTS in groups["rollout"].group.here
        check(groups["rollout"].role.pool, "rollout", "actor")
        if groups["actor"].role.pool == groups["rollout"].role.pool and groups["actor"].role.pool in shared:
            assert "actor" in unable or groups["actor"].group.here == {WEIGHTS}
            assert "rollout" in unable or groups["rollout"].group.here == {WEIGHTS}
        return REPORT

    for name, training in uses:
        if name not in groups:
            continue
        pool = groups[name].role.pool
        if name == "rollout":
            with turns.rollout(sync):
                assert groups["rollout"].group.here == {WEIGHTS, CACHE}
                check(pool, "rollout")
        else:
            with turns.using(name, training=training and groups[name].role.is_trained):
                assert WEIGHTS in groups[name].group.here
                assert not training or groups[name].group.here == frozenset(turns._memories[name].parts)
                check(pool, name)


def test_what_shares_no_device_never_moves() -> None:
    apart = [role("actor", "a", trained=True), role("rollout", "b")]
    turns, _, calls = turns_of(apart, shared=())
    with turns.rollout(lambda: REPORT) as report:
        assert report is REPORT
    with turns.using("actor", training=True) as stages:
        assert stages == {}
    assert calls == []


def test_a_sync_to_another_pool_moves_nothing_of_a_source_that_is_there() -> None:
    turns, _, calls = turns_of([role("actor", trained=True), role("ref"), role("rollout", "own")])
    with turns.using("actor", training=True):
        pass
    calls.clear()
    with turns.rollout(lambda: REPORT) as report:
        assert report is REPORT
    assert calls == []
    with turns.using("ref"), turns.rollout(lambda: REPORT, source="ref"):
        pass
    assert calls == ["offload actor optimizer gradients", "offload actor weights", "onload ref weights"]


def test_a_failed_sync_puts_the_engine_to_sleep_and_the_next_use_finds_its_memory() -> None:
    turns, groups, calls = turns_of([role("actor", trained=True), role("rollout")])

    def fail() -> SyncReport:
        raise WeightSyncError("not covered")

    with pytest.raises(WeightSyncError, match="not covered"), turns.rollout(fail):
        raise AssertionError("a phase began whose sync had failed")
    assert calls[-1] == "sleep rollout 2"
    with turns.using("actor", training=True):
        assert groups["actor"].group.here == {"weights", "optimizer", "gradients"}


def test_a_device_that_is_in_use_is_not_given_to_another_role_of_its_pool() -> None:
    turns, _, _ = turns_of([role("actor", trained=True), role("ref"), role("reward", "b"), role("rollout")])
    with turns.rollout(lambda: REPORT):
        with turns.using("reward"):
            pass
        said = r"'ref' cannot have the devices of pool 'all': 'rollout' is using them"
        with pytest.raises(RlsdkError, match=said), turns.using("ref"):
            raise AssertionError("two roles had one device")
    with turns.using("ref"):
        pass


def test_pools_of_several_roles_on_accelerators_are_shared_and_those_on_cpus_when_forced() -> None:
    pools = (
        PoolSpec(name="gpu", devices_per_node=(1,), device="cuda"),
        PoolSpec(name="cpu", devices_per_node=(1,)),
        PoolSpec(name="own", devices_per_node=(1,), device="cuda"),
    )
    roles = {"actor": "gpu", "ref": "gpu", "critic": "cpu", "reward": "cpu", "rollout": "own"}
    placement = PlacementSpec(pools=pools, roles=roles)
    assert shared_pools(placement) == {"gpu"}
    assert shared_pools(placement, forced=True) == {"gpu", "cpu"}


def test_a_stage_is_named_by_call_role_and_part() -> None:
    assert Move(role="actor", method="onload", argument=("weights",), after=EVERYTHING).stage == "onload actor weights"
    assert Move(role="rollout", method="sleep", argument=2, after=frozenset()).stage == "sleep rollout"


def test_real_engines_train_on_through_their_turns(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The reference engine refuses what needs a part that is off, so a turn that were missing would raise."""
    from rlsdk.algorithms import SftObjective, loss_weights
    from rlsdk.config import load_config
    from rlsdk.interfaces import RankContext
    from rlsdk.registry import Registry
    from rlsdk.testing.process.models import write_tiny_model
    from rlsdk.testing.sharding.local_groups import LocalGroup
    from rlsdk.trainer.learner.mini_batches import make_sft_batch
    from rlsdk.trainer.roles.hosts import EngineOptions, TrainHost
    from rlsdk.trainer.roles.placement import roles

    registry = Registry.discover({"RLSDK_PLUGINS": "rlsdk"})
    path = str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))
    config = load_config([], ["--model", path, "--algorithm.advantage", "gae", "--algorithm.kl_coef", "0.1"], registry)
    turns = DeviceTurns(shared=["actor+ref+critic"])
    groups: dict[str, Any] = {}
    for one in roles(config, "cpu", needed=["actor", "ref", "critic"]):
        turns.make_room(one.pool)
        spec = registry.backend(one.kind, one.backend)
        before = torch.get_rng_state()
        host = TrainHost(RankContext(role=one.name), spec.engine, one.spec, EngineOptions(spec=spec, raw={}))
        assert torch.equal(torch.get_rng_state(), before), "a role's weights were drawn from the others' numbers"
        group: Any = LocalGroup([host], backend=spec.name)
        groups[one.name] = RoleGroup(role=one, spec=spec, group=group)
        turns.add(groups[one.name])
    batch = make_sft_batch([[1, 2], [3, 4]], [[5, 6], [7]])
    batch = batch.with_tokens(loss_weight=loss_weights(batch))
    with pytest.raises(RlsdkError, match=r"of role 'actor' are offloaded"):
        groups["actor"].run("forward", batch, {"log_probs": "x"})
    losses = []
    for _ in range(2):
        with turns.using("ref"):
            (ref,) = groups["ref"].run("forward", batch, {"log_probs": "ref_log_probs"})
        with turns.using("critic"):
            (values,) = groups["critic"].run("forward", batch, {"values": "values"})
        with turns.using("actor", training=True):
            (result,) = groups["actor"].run("update", batch, SftObjective())
        losses.append(result.update.loss)
    assert losses[1] < losses[0]
    assert ref["ref_log_probs"].shape == values["values"].shape == (batch.num_tokens,)
    assert turns.on_device("critic") == frozenset()
