"""A local Ray without what nobody uses: its daemons are two programs of Ray's, and one helper that comes up later."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress

import psutil

from rlsdk.cluster.ray_cluster import agents
from rlsdk.cluster.ray_cluster.local import LocalRay

RAYLET = ["raylet", "--dashboard_agent_command=python agent.py --minimal",
          "--runtime_env_agent_command=python main.py --port=1", "--head"]  # fmt: skip


def test_the_raylet_s_own_agent_gives_way_and_the_dashboard_s_is_not_started() -> None:
    assert agents.lighter_command(RAYLET, "python agent_stub.py", "/usr/bin/nice") == [
        "raylet",
        "--dashboard_agent_command=python agent_stub.py",
        "--runtime_env_agent_command=/usr/bin/nice -n 19 python main.py --port=1",
        "--head",
    ]
    assert agents.lighter_command(RAYLET, None, None) == RAYLET, "where these programs are missing"


def test_what_stands_for_an_agent_takes_any_arguments_and_goes_with_its_parent() -> None:
    script = f"""
import subprocess, sys, time
stub = {agents.__file__.replace("agents.py", "agent_stub.py")!r}
process = subprocess.Popen([sys.executable, "-I", "-S", stub, "--x"])
time.sleep(1.0)
print(process.pid, process.poll())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    pid, code = done.stdout.split()
    assert code == "None"
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(pid)).wait(30)


def test_a_port_is_free_and_outside_of_those_that_systems_give_out() -> None:
    port = agents.free_port("127.0.0.1")
    assert 20_000 <= port < 32_000
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))


def test_a_local_ray_runs_no_dashboard(ray_here: LocalRay) -> None:
    names = {process.name() for process in psutil.Process().children(recursive=True)}
    assert {"gcs_server", "raylet"} <= names
    assert not [name for name in names if "Dashboard" in name]


def test_a_signal_to_the_program_s_process_group_does_not_reach_its_daemons(ray_here: LocalRay) -> None:
    """`timeout 600 rlsdk train` sends SIGTERM to all of them at once: the head ended first, and the program asked it
    for a minute, saved, and left with 1 in place of 75."""
    daemons = [one for one in psutil.Process().children(recursive=True) if one.name() in ("gcs_server", "raylet")]
    assert len(daemons) >= 2
    assert os.getpgrp() not in {os.getpgid(one.pid) for one in daemons}
