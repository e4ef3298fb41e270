"""Nobody but the run uses its cluster: loopback only, a token for every call, folders that only this user can read."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
import ray

from rlsdk.cluster import Cluster, PlacementSpec, PoolSpec, WorkerGroup
from rlsdk.cluster.ray_cluster.local import LocalRay, temporary_parent

Found = TypeVar("Found")

STRANGER = """
import sys
import ray

ray.init(address=sys.argv[1], log_to_driver=False)
print("TASK RAN:", ray.get(ray.remote(lambda: "as that user").options(num_cpus=0).remote(), timeout=20))
"""
JOINER = """
import sys
from rlsdk.cluster import Cluster, preset_placement

with Cluster.start(preset_placement("colocate_all", ["actor"]), address=sys.argv[1], timeout_s=30):
    print("JOINED")
"""
OPEN_CLUSTER = """
import sys
from ray._private.node import Node
from ray._private.parameter import RayParams

params = RayParams(num_cpus=1, temp_dir=sys.argv[1], include_log_monitor=False, no_monitor=True)
node = Node(params, head=True, shutdown_at_exit=False, spawn_reaper=False, ray_init_cluster=True)
print(node.address, flush=True)
sys.stdin.read()
node.kill_all_processes(check_alive=False, allow_graceful=True)
"""
LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


class Stranger:
    """A program of this machine that knows the port, and how to reach it."""

    def __init__(self, script: str = STRANGER, address: str | None = None, **variables: str) -> None:
        own = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
        environment = {name: value for name, value in os.environ.items() if name not in own}
        environment |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_NUM_REDIS_GET_RETRIES": "2"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, address or ray.get_runtime_context().gcs_address],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environment, **variables},
        )

    def output(self) -> str:
        """All that it prints."""
        try:
            return self.process.communicate(timeout=100)[0]
        finally:
            self.process.kill()


@pytest.fixture(scope="module")
def run(ray_here: LocalRay, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[psutil.Process]]:
    """Every process of a run with two workers that have met in a process group, and this process. Some of Ray's come
    and go by themselves."""
    placement = PlacementSpec(pools=(PoolSpec(name="own", devices_per_node=(2,)),), roles={"met": "own"})
    with Cluster.start(placement, timeout_s=120, log_dir=tmp_path_factory.mktemp("met")) as cluster:
        group = cluster.create_group("met", "cluster_hosts:GlooHost")
        assert group.run("total", 1.5) == [4.5, 4.5]
        this = psutil.Process()
        found = [this, *this.children(recursive=True)]
        names = seen(found, psutil.Process.name)
        assert {"gcs_server", "raylet", "ray::DeviceWorker"} <= set(names)
        yield found


def seen(processes: Sequence[psutil.Process], look: Callable[[psutil.Process], Found]) -> list[Found]:
    """What is seen of each process that is still there."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found.append(look(process))
    return found


def test_a_stranger_s_driver_is_refused(ray_here: LocalRay) -> None:
    refused = {"none": Stranger(), "wrong": Stranger(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64)}
    for token, stranger in refused.items():
        output = stranger.output()
        assert "TASK RAN" not in output, token
        assert "AuthenticationError" in output, output[-800:]
    # The attack works where the token is known, so it is the token that stops it.
    known = Stranger(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=f"{ray_here.folder}/token")
    assert "TASK RAN: as that user" in known.output()


def test_no_process_of_a_run_listens_to_other_machines(run: list[psutil.Process]) -> None:
    sockets = seen(run, lambda process: [(process.name(), one) for one in process.net_connections("inet")])
    listening = {
        (name, socket.laddr.ip, socket.laddr.port)
        for of_process in sockets
        for name, socket in of_process
        if socket.status == psutil.CONN_LISTEN
    }
    assert len(listening) >= 5, "gcs, raylet, its object manager, workers"
    assert {entry for entry in listening if entry[1] not in LOOPBACK} == set()


def test_the_token_is_in_no_command_line_no_environment_and_no_log(
    ray_here: LocalRay, run: list[psutil.Process]
) -> None:
    folder = Path(ray_here.folder)
    token = (folder / "token").read_text()
    assert len(token) == 64
    assert [words for words in seen(run, psutil.Process.cmdline) if token in " ".join(words)] == []
    assert [names for names in seen(run, psutil.Process.environ) if token in names.values()] == []
    holding = [path for path in folder.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
    assert holding == [folder / "token"]
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ, "graders and other children of the controller do not need it"


def test_the_cluster_s_folder_and_the_workers_logs_are_private(ray_here: LocalRay, group: WorkerGroup) -> None:
    def mode(path: str | Path) -> int:
        return stat.S_IMODE(os.stat(path).st_mode)

    assert mode(ray_here.folder) == 0o700
    assert mode(f"{ray_here.folder}/token") == 0o600
    (log,) = group.members[0].worker.known().logs
    assert mode(log) == 0o600
    assert mode(Path(log).parent) == 0o700


def test_joining_without_the_token_says_which_variables_to_set(ray_here: LocalRay) -> None:
    output = Stranger(JOINER).output()
    assert "PlacementError: the Ray cluster at placement.ray_address" in output, output[-800:]
    assert "RAY_AUTH_TOKEN_PATH" in output


def test_joining_a_cluster_that_asks_for_no_token_warns() -> None:
    free = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryDirectory(dir=temporary_parent(), prefix="open-", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-c", OPEN_CLUSTER, folder]
        head = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **free}
        )
        with head:
            assert head.stdin is not None
            assert head.stdout is not None
            output = Stranger(JOINER, head.stdout.readline().strip()).output()
            head.stdin.close()
    assert "JOINED" in output, output[-800:]
    assert "asks for no token: anyone who reaches its ports can run code" in output
