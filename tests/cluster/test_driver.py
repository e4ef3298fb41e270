"""A run's own cluster and the machine around it: variables of other clusters, folders, the loopback interface."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlsdk.cluster import Cluster, PlacementSpec, PoolSpec, WorkerGroup, processors_notice
from rlsdk.cluster.ray_cluster.access import check_tls
from rlsdk.cluster.ray_cluster.driver import ANOTHER_CLUSTER_S, become_driver, own_cluster_variables
from rlsdk.cluster.ray_cluster.local import temporary_parent
from rlsdk.interfaces import PlacementError

OF_ANOTHER = {
    "RAY_ADDRESS": "ray://10.255.255.1:10001",
    "RAY_CLIENT_MODE": "1",
    "RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": {"working_dir": "gcs://gone.zip"}}',
    "RAY_NAMESPACE": "other",
    "RAY_OVERRIDE_RESOURCES": '{"CPU": 0}',
    "RAY_REDIS_ADDRESS": "10.255.255.1:6379",
    "RAY_RUNTIME_ENV_HOOK": "no_such_module.hook",
}
RUN = """
from rlsdk.cluster import Cluster, preset_placement
with Cluster.start(preset_placement("colocate_all", ["actor"], devices_per_node=1), timeout_s=120) as cluster:
    print("ZERO", cluster.create_group("actor", "cluster_hosts:EchoHost").run("zero"))
"""
CONNECT = "from rlsdk.cluster.ray_cluster.access import check_loopback; check_loopback()"


def test_variables_of_another_cluster_have_no_effect_and_are_named() -> None:
    tests = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-P", "-c", RUN], env={**os.environ, "PYTHONPATH": tests, **OF_ANOTHER}, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ZERO 0" in done.stdout
    assert "RAY_CLIENT_MODE has no effect" in done.stderr
    names = ", ".join(sorted(OF_ANOTHER.keys() - {"RAY_CLIENT_MODE"}))
    assert f"so {names} have no effect; `--placement.ray_address auto` joins" in done.stderr


def test_they_are_hidden_while_the_cluster_starts_and_back_afterwards(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ANOTHER_CLUSTER_S:
        monkeypatch.delenv(name, raising=False)
    with caplog.at_level(logging.WARNING), own_cluster_variables():
        pass
    assert caplog.text == ""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    with caplog.at_level(logging.WARNING), own_cluster_variables():
        assert "RAY_ADDRESS" not in os.environ
    assert "so RAY_ADDRESS has no effect" in caplog.text
    assert os.environ["RAY_ADDRESS"] == "10.0.0.9:6379"


def test_encryption_without_certificates_is_named_before_anything_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_USE_TLS", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"):
        monkeypatch.delenv(name, raising=False)
    check_tls()
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with pytest.raises(PlacementError, match=r"RAY_USE_TLS is '1'.* but RAY_TLS_SERVER_CERT is not set"):
        check_tls()
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_TLS_SERVER_CERT", str(tmp_path / "file"))
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", str(tmp_path / "absent"))
    with pytest.raises(PlacementError, match=r"RAY_TLS_SERVER_KEY is '.*absent', which is no file that can be read"):
        check_tls()
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", str(tmp_path / "file"))
    monkeypatch.setenv("RAY_TLS_CA_CERT", str(tmp_path / "file"))
    check_tls()
    monkeypatch.setenv("RAY_USE_TLS", "0")
    monkeypatch.delenv("RAY_TLS_CA_CERT")
    check_tls()


def test_a_program_that_uv_run_started_uploads_no_folder_to_its_workers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private import ray_constants

    seen: list[object] = []
    monkeypatch.setattr("ray.init", lambda **_: seen.append(ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV))
    become_driver()
    assert seen == [False]
    assert ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV is not False, "the program's own calls of Ray are its own"


def test_the_gcs_keeps_no_events_of_calls(group: WorkerGroup) -> None:
    from ray._private.state import state

    for _ in range(20):
        group.run("zero")
    connect = getattr(state, "_connect_and_get_accessor", None)
    if connect is None:
        pytest.skip("this Ray has another way to its state")
    assert len(connect().get_task_events()) == 0


@pytest.mark.parametrize("name", ["prüfung", "a-folder-of-a-long-name-for-sockets"])
def test_ray_s_folder_has_a_short_path_of_ascii(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    assert temporary_parent() == "/tmp"


def test_a_folder_that_ray_cannot_use_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/prüfung")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PlacementError, match=r"TMPDIR '/prüfung': Ray needs a folder .* ASCII"):
        temporary_parent()


@pytest.mark.parametrize(
    ("before", "works"),
    [
        ("ip link set lo up", True),
        ("true", False),
        ("ip link set lo up && ip address del 127.0.0.1/8 dev lo", False),
    ],
    ids=["as usual", "down", "IPv6 only"],
)
def test_a_machine_without_a_loopback_is_said_at_once(before: str, works: bool) -> None:
    command = ["unshare", "--net", "--map-root-user", "sh", "-c"]
    try:
        able = subprocess.run([*command, "ip link set lo up"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        able = False
    if not able:
        pytest.skip("network namespaces cannot be made here")
    done = subprocess.run(
        [*command, f'{before} && exec {sys.executable} -P -c "{CONNECT}"'], capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert (done.returncode == 0) is works, done.stderr
    assert works or "PlacementError: this machine cannot connect to itself at 127.0.0.1" in done.stderr
    assert works or "`ip link set lo up; ip address add 127.0.0.1/8 dev lo`" in done.stderr


@pytest.mark.parametrize(
    ("pools", "threads", "usable", "says"),
    [
        ((1, 1), 2, 2, "the 2 devices of 'a', 'b' ask for 4 processors, and 2 can be used here.*cpus_per_device 1`"),
        ((4,), 8, 16, "the 4 devices of 'a' ask for 32 processors, and 16 can be used here.*cpus_per_device 4`"),
        ((1, 1), 2, 4, None),
        ((8,), 1, 2, None),
    ],
)
def test_threads_that_wait_for_one_another_are_said_where_fewer_would_do(
    pools: tuple[int, ...], threads: int, usable: int, says: str | None
) -> None:
    specs = tuple(
        PoolSpec(name=name, devices_per_node=(devices,), cpus_per_device=threads)
        for name, devices in zip("ab", pools, strict=False)
    )
    notice = processors_notice(PlacementSpec(pools=specs, roles={}), usable)
    assert (notice is None) if says is None else re.search(says, notice or ""), notice
