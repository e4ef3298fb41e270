"""A cluster of two nodes, both on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from rlsdk.cluster import Cluster, PlacementSpec, PoolSpec
from rlsdk.cluster.ray_cluster.local import LocalRay
from rlsdk.cluster.ray_cluster.nodes import choose_nodes, find_down, node_capacities, run_on_nodes
from rlsdk.interfaces import PlacementError, WorkerError
from rlsdk.kit.ranks.replica_devices import visible_devices

NODE = """
import sys
from ray._private.node import Node
from ray._private.parameter import RayParams

cpus, gpus = map(int, sys.argv[2:])
params = RayParams(
    gcs_address=sys.argv[1], node_ip_address="127.0.0.1", num_cpus=cpus, num_gpus=gpus, include_log_monitor=False
)
node = Node(params, head=False, shutdown_at_exit=False, spawn_reaper=False)
sys.stdin.read()
node.kill_all_processes(check_alive=False, allow_graceful=True)
"""


@pytest.fixture(scope="module")
def second_node(ray_here: LocalRay) -> Iterator[None]:
    """Adds a node with three processors, and two GPUs that Ray takes on trust."""
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{ray_here.folder}/token"}
    process = start_node(variables, cpus=3, gpus=2)
    try:
        await_nodes(2)
        yield
    finally:
        end_node(process)
        await_nodes(1)


def start_node(variables: dict[str, str], *, cpus: int, gpus: int = 0) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", NODE, ray.get_runtime_context().gcs_address, str(cpus), str(gpus)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **variables, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
        start_new_session=True,
    )


def end_node(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait(60)


def await_nodes(count: int) -> None:
    deadline = time.monotonic() + 120
    while len(node_capacities()) != count:
        assert time.monotonic() < deadline, f"the cluster has {len(node_capacities())} nodes, not {count}"
        time.sleep(0.1)


def placement(*devices: int) -> PlacementSpec:
    return PlacementSpec(pools=(PoolSpec(name="wide", devices_per_node=devices),), roles={"actor": "wide"})


@pytest.mark.parametrize("devices", [1, 2])
def test_what_a_lost_node_hosted_is_started_again_on_another(
    devices: int, ray_here: LocalRay, second_node: None
) -> None:
    """The smallest node that has room is chosen first; its raylet is killed, and nothing on it can say goodbye. A rank
    of two devices finds both on one node again; what starts before Ray knows of the loss is not sent there."""
    before = {node.node_id for node in node_capacities()}
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{ray_here.folder}/token"}
    process = start_node(variables, cpus=2)
    try:
        await_nodes(3)
        (own,) = {node.node_id for node in node_capacities()} - before
        with Cluster.start(placement(devices), timeout_s=120) as cluster:
            group = cluster.create_group("actor", "cluster_hosts:FragileHost", devices_per_rank=devices)
            worker = group.members[0].worker
            assert worker.known().node_id == own, "the node that it fills best"
            # What it has just forked has its name for a moment.
            (raylet,) = [one for one in psutil.Process(process.pid).children() if "raylet" in one.name()]
            is_best = own in choose_nodes(placement(1))["wide"]
            raylet.kill()
            deadline = time.monotonic() + 60
            while not find_down([own]):  # its workers have its sockets a little longer
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert own not in choose_nodes(placement(1))["wide"]
            assert is_best == (devices == 1), "a processor of it is free"
            with pytest.raises(WorkerError, match="actor rank 0 died"):
                group.run("hang_on", 0, 60.0)
            cluster.restart("actor", 0)
            assert group.run("ranks") == [0]
            assert group.members[0].worker.known().node_id in before
            ctx = group.contexts[0]
            assert ctx.device_nodes == (group.members[0].worker.known().node,) * devices
            assert (ctx.node, ctx.bundles) == (ctx.device_nodes[0], tuple(range(devices)))
    finally:
        end_node(process)
        await_nodes(2)


def test_ranks_stand_where_the_placement_says_and_die_with_their_last_words(second_node: None) -> None:
    with Cluster.start(placement(1, 3), timeout_s=120) as cluster:
        group = cluster.create_group("actor", "cluster_hosts:FragileHost")
        assert [ctx.local_rank for ctx in group.contexts] == [0, 0, 1, 2]
        nodes = [member.worker.known().node_id for member in group.members]
        assert nodes.count(nodes[1]) == 3
        away = [node != ray.get_runtime_context().get_node_id() for node in nodes].index(True)
        with pytest.raises(WorkerError, match=f"actor rank {away} died") as caught:
            group.run("die", away)
        assert "  these are my last words" in str(caught.value), "read on the node where it was written"


def test_each_worker_sees_its_own_gpu_and_nothing_else(second_node: None, other_environment: Path) -> None:
    pools = (PoolSpec(name="gpus", devices_per_node=(2,), device="cuda"),)
    with Cluster.start(PlacementSpec(pools=pools, roles={"actor": "gpus", "ref": "gpus"}), timeout_s=120) as cluster:
        group = cluster.create_group("actor", "cluster_hosts:EchoHost")
        assert group.run("environment", "CUDA_VISIBLE_DEVICES") == ["0", "1"]
        assert [ctx.device for ctx in group.contexts] == ["cuda:0", "cuda:0"], "as torch counts what it sees"
        apart = cluster.create_group("ref", "cluster_hosts:EchoHost", py_executable=str(other_environment))
        assert apart.run("environment", "CUDA_VISIBLE_DEVICES") == ["0", "1"]
        assert set(apart.run("pid")).isdisjoint(group.run("pid"))


def test_a_replica_knows_its_gpus_and_its_workers_find_the_bundles_of_the_run(second_node: None) -> None:
    """What processes of an engine are started with: its devices on this node, and this pool's placement group."""
    pools = (PoolSpec(name="gpus", devices_per_node=(2,), device="cuda"),)
    with Cluster.start(PlacementSpec(pools=pools, roles={"rollout": "gpus"}), timeout_s=120) as cluster:
        group = cluster.create_group("rollout", "cluster_hosts:EchoHost", devices_per_rank=2)
        (ctx,) = group.contexts
        assert (ctx.accelerators, ctx.bundles, len(set(ctx.device_nodes))) == (("0", "1"), (0, 1), 1)
        assert visible_devices(ctx) == {"CUDA_VISIBLE_DEVICES": "0,1"}
        assert group.run("environment", "CUDA_VISIBLE_DEVICES") == ["0"], "what Ray shows the worker itself"
        assert group.run("bundles") == [2]


def test_nodes_of_a_run_share_its_folder_and_get_chosen_variables(
    second_node: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    address = ray.get_runtime_context().gcs_address
    with Cluster.start(
        placement(1, 1), address=address, timeout_s=120, shared_folder=tmp_path, forward_env=["NCCL_*"],
        network_interface="lo",
    ) as cluster:  # fmt: skip
        assert list(tmp_path.iterdir()) == []
        group = cluster.create_group("actor", "cluster_hosts:EchoHost")
        assert group.run("environment", "NCCL_DEBUG") == ["WARN", "WARN"]
        assert group.run("environment", "GLOO_SOCKET_IFNAME") == ["lo", "lo"]
        assert {ctx.master_addr for ctx in group.contexts} == {"127.0.0.1"}


def test_nodes_answer_by_processes_of_their_own_ray_or_it_is_said_which_did_not(second_node: None) -> None:
    nodes, pid = [node.node_id for node in node_capacities()], "echo $PPID"
    assert str(os.getpid()) in run_on_nodes(nodes, subprocess.getoutput, pid, timeout_s=120.0)
    apart = run_on_nodes(nodes, subprocess.getoutput, pid, timeout_s=120.0, in_own_process=False)
    assert len({str(os.getpid()), *apart}) == 3
    own = ray.get_runtime_context().get_node_id()
    other = next(node for node in nodes if node != own)
    with pytest.raises(WorkerError, match=rf"asked {other[:8]} .* for check_call, and one of them gave no answer"):
        run_on_nodes([other], subprocess.check_call, ["false"], timeout_s=120.0)
    with pytest.raises(WorkerError, match=r"for check_call, and one of them gave no answer: .*timed out"):
        run_on_nodes([other], subprocess.check_call, ["sleep", "5"], timeout_s=0.5)


def test_workers_without_gpus_see_none(second_node: None) -> None:
    with Cluster.start(placement(1, 1), timeout_s=120) as cluster:
        group = cluster.create_group("actor", "cluster_hosts:EchoHost")
        assert group.run("environment", "CUDA_VISIBLE_DEVICES") == ["", ""]


def test_what_the_nodes_do_not_have_is_refused_at_once(second_node: None) -> None:
    start = time.monotonic()
    with pytest.raises(PlacementError, match="pool 'wide' wants 3 different nodes") as caught:
        Cluster.start(placement(1, 1, 1), timeout_s=120)
    assert time.monotonic() - start < 30, "and not only when the cluster's start is given up"
    assert " of 3" in str(caught.value)
    with pytest.raises(PlacementError, match="no node has 11 CPUs"):
        Cluster.start(placement(11))


def test_what_another_run_gives_back_is_waited_for(second_node: None) -> None:
    for _ in range(3):
        with Cluster.start(placement(3, 3), timeout_s=120):
            pass


def test_what_another_run_keeps_is_refused_with_what_is_free(second_node: None) -> None:
    with Cluster.start(placement(2, 2), timeout_s=120), pytest.raises(PlacementError) as caught:
        Cluster.start(placement(2, 2))
    assert "1 of 3" in str(caught.value)


def test_an_address_where_nobody_answers_is_a_placement_error() -> None:
    script = (
        "from rlsdk.cluster import Cluster, preset_placement\n"
        "Cluster.start(preset_placement('colocate_all', ['actor']), address='127.0.0.1:1')\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert "PlacementError: no Ray cluster answers at placement.ray_address '127.0.0.1:1'" in found.stderr
