"""What holds inside a worker: threads, roles, contexts, peers, environments."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from rlsdk.cluster import Cluster, PlacementSpec, PoolSpec, WorkerGroup
from rlsdk.cluster.ray_cluster.local import LocalRay
from rlsdk.cluster.workers.scratch import make_scratch_dir
from rlsdk.interfaces import ConfigError, Peer

MakeGroup = Callable[..., WorkerGroup]


def test_everything_but_concurrent_methods_runs_on_the_thread_that_built_the_host(make_group: MakeGroup) -> None:
    group = make_group()
    group.run("sleepy", 0.0)
    assert group.run("note_thread") == [1] * 4
    assert group.run("let_go") == [False] * 4


def test_a_concurrent_method_is_served_while_the_engine_thread_is_busy(make_group: MakeGroup) -> None:
    group = make_group()
    busy = group.submit("wait_for_release")
    assert not busy.done()
    group.run("let_go", timeout_s=60)
    assert busy.result(60) == [True] * 4


def test_async_methods_run_to_their_end(group: WorkerGroup) -> None:
    assert group.run("sleepy", 0.05) == [0, 1, 2, 3]


def test_two_roles_live_in_one_process_and_see_each_other(make_group: MakeGroup) -> None:
    first, second = make_group(), make_group()
    assert first.run("pid") == second.run("pid")
    peers: list[Peer] = list(second.peers())
    found = first.run_each("ask_peer", [(peers[0], 5.0)] * 4)
    assert {pid for pid, _ in found} == {second.run("pid")[0]}
    assert [local for _, local in found] == [True, False, False, False]


def test_peers_reach_concurrent_methods_only(group: WorkerGroup) -> None:
    with pytest.raises(ConfigError, match="is not concurrent"):
        group.peers()[0].call("pid", timeout_s=5)


def test_contexts_say_where_each_rank_stands(group: WorkerGroup) -> None:
    contexts = group.contexts
    assert [ctx.rank for ctx in contexts] == [ctx.local_rank for ctx in contexts] == [0, 1, 2, 3]
    assert {(ctx.world_size, ctx.device, ctx.seed, ctx.num_threads) for ctx in contexts} == {(4, "cpu", 7, 1)}
    assert len({(ctx.master_addr, ctx.master_port, ctx.node) for ctx in contexts}) == 1
    assert contexts[0].master_port > 0
    assert [ctx.bundles for ctx in contexts] == [(0,), (1,), (2,), (3,)]


def test_threads_are_limited_before_any_engine_is_imported(group: WorkerGroup) -> None:
    assert group.run("environment", "OMP_NUM_THREADS") == ["1"] * 4


def test_a_worker_has_a_scratch_folder_that_goes_with_it(own_cluster: Callable[[int], Cluster]) -> None:
    cluster = own_cluster(1)
    folder = Path(cluster.create_group("victim", "cluster_hosts:EchoHost").run("scratch")[0])
    assert folder.is_dir()
    cluster.close()
    assert not folder.exists()


def test_the_scratch_folder_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    left = tmp_path / f"rlsdk-scratch-{process.pid}-left"
    left.mkdir()
    made = Path(make_scratch_dir(str(tmp_path)))
    assert list(tmp_path.iterdir()) == [made]


def test_a_rank_may_span_several_devices(cluster: Cluster) -> None:
    group = cluster.create_group("role39", "cluster_hosts:EchoHost", devices_per_rank=2)
    assert [ctx.bundles for ctx in group.contexts] == [(0, 1), (2, 3)]
    with pytest.raises(ConfigError, match="3 devices a rank do not divide the 4 devices"):
        cluster.create_group("role38", "cluster_hosts:EchoHost", devices_per_rank=3)


def test_a_role_of_another_environment_gets_processes_of_its_own(
    own_cluster: Callable[[int], Cluster], other_environment: Path
) -> None:
    cluster = own_cluster(1)
    here = cluster.create_group("victim", "cluster_hosts:EchoHost")
    there = cluster.create_group("other", "cluster_hosts:EchoHost", py_executable=str(other_environment))
    assert here.run("interpreter") == [sys.prefix]
    assert there.run("interpreter") == [str(other_environment.parent.parent)]
    assert here.run("pid") != there.run("pid")
    assert here.contexts[0].node == there.contexts[0].node


def test_a_pool_whose_roles_all_live_elsewhere_starts_no_worker_here(
    ray_here: LocalRay, other_environment: Path, tmp_path: Path
) -> None:
    placement = PlacementSpec(
        pools=(PoolSpec(name="far", devices_per_node=(1,)), PoolSpec(name="near", devices_per_node=(1,))),
        roles={"rollout": "far", "actor": "near"},
    )
    far = str(other_environment)
    logs = tmp_path / "logs"
    with Cluster.start(placement, timeout_s=60, log_dir=logs, interpreters={"rollout": far}) as cluster:
        there = cluster.create_group("rollout", "cluster_hosts:EchoHost", py_executable=far)
        assert there.run("interpreter") == [str(other_environment.parent.parent)]
        assert cluster.create_group("actor", "cluster_hosts:EchoHost").run("interpreter") == [sys.prefix]
    assert sorted(path.name for path in logs.iterdir()) == ["far-0-env0.log", "near-0.log"]


def test_an_interpreter_that_cannot_host_a_worker_is_refused_before_one_is_started(
    cluster: Cluster, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"'/no/python' does not run on node .*No such file"):
        cluster.create_group("role37", "cluster_hosts:EchoHost", py_executable="/no/python")
    venv.create(tmp_path, symlinks=True)
    with pytest.raises(
        ConfigError, match=r"has python .*, ray missing, rlsdk missing, numpy missing, but .* run `uv pip install"
    ):
        cluster.create_group("role37", "cluster_hosts:EchoHost", py_executable=str(tmp_path / "bin" / "python"))


def test_an_unknown_role_and_a_role_made_twice_are_refused(cluster: Cluster, group: WorkerGroup) -> None:
    with pytest.raises(ConfigError, match="'rolle1' has no pool; did you mean 'role1'"):
        cluster.create_group("rolle1", "cluster_hosts:EchoHost")
    with pytest.raises(ConfigError, match="already has a group"):
        cluster.create_group(group.role, "cluster_hosts:EchoHost")


def test_the_controller_is_not_a_worker(group: WorkerGroup) -> None:
    assert os.getpid() not in group.run("pid")
    assert all(peer.local() is None for peer in group.peers())
