"""A local Ray without what nobody uses: its daemons are two programs of Ray's, and one helper that comes up later."""

from __future__ import annotations

import socket

import psutil

from rlsdk.cluster import agents
from rlsdk.cluster.local import LocalRay

RAYLET = ["raylet", "--dashboard_agent_command=python agent.py --minimal",
          "--runtime_env_agent_command=python main.py --port=1", "--head"]  # fmt: skip


def test_the_raylet_s_own_agent_gives_way_and_the_dashboard_s_is_not_started() -> None:
    assert agents.lighter_command(RAYLET, "/bin/sleep", "/usr/bin/nice") == [
        "raylet",
        "--dashboard_agent_command=/bin/sleep 2147483647",
        "--runtime_env_agent_command=/usr/bin/nice -n 19 python main.py --port=1",
        "--head",
    ]
    assert agents.lighter_command(RAYLET, None, None) == RAYLET, "where these programs are missing"


def test_a_port_is_free_and_outside_of_those_that_systems_give_out() -> None:
    port = agents.free_port("127.0.0.1")
    assert 20_000 <= port < 32_000
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))


def test_a_local_ray_runs_no_dashboard(ray_here: LocalRay) -> None:
    names = {process.name() for process in psutil.Process().children(recursive=True)}
    assert {"gcs_server", "raylet"} <= names
    assert not [name for name in names if "Dashboard" in name]
