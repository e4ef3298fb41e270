"""A raylet that does not wait for its agents.

A raylet starts two Python programs and accepts no worker until both have reported their ports: most of the time that
Ray takes to start. The first one serves the dashboard and its metrics, which a cluster of one run does not have. The
second makes the environments of workers that ask for one; where none does, it may come up after the workers.
"""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DASHBOARD_FLAG = "--dashboard_agent_command="
ENVIRONMENTS_FLAG = "--runtime_env_agent_command="
_AGENT_STUB = Path(__file__).with_name("agent_stub.py")
_PORTS = range(20_000, 32_000)
"""Below the ephemeral ports, so that no process takes one by accident between the check and its use."""
_NOT_SERVED = -1
"""Port number that an agent without a dashboard reports."""
_DASHBOARD_PORTS = ("METRICS_AGENT_PORT_NAME", "METRICS_EXPORT_PORT_NAME", "DASHBOARD_AGENT_LISTEN_PORT_NAME")
_LOWEST_PRIORITY = "19"


def free_port(host: str) -> int:
    """Returns a free port; 0 if none was found, with which a server chooses its own."""
    for port in random.sample(_PORTS, 50):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    return 0


@contextmanager
def light_agents(session_dir: str, node_id: str, *, environments_port: int, environments_first: bool) -> Iterator[None]:
    """Inside, a started raylet has no dashboard agent, and its environment agent runs at low priority.

    Args:
        session_dir: of the Ray node.
        node_id: of the Ray node, in hex.
        environments_port: port on which the environment agent was told to listen; 0: it chooses one.
        environments_first: workers will ask for environments at once, so the agent keeps normal priority.
    """
    from ray._private import services

    agent_stub: str | None = subprocess.list2cmdline([sys.executable, "-I", "-S", str(_AGENT_STUB)])
    lower = None if environments_first or not environments_port else shutil.which("nice")
    ports: dict[str, int] = {} if lower is None else {"RUNTIME_ENV_AGENT_PORT_NAME": environments_port}
    ports |= dict.fromkeys(_DASHBOARD_PORTS, _NOT_SERVED)
    if not _tell_ports(session_dir, node_id, ports):
        agent_stub = lower = None
    start = services.start_ray_process

    def lighter(command: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        return start(lighter_command(command, agent_stub, lower), *args, **kwargs)

    services.start_ray_process = lighter
    try:
        yield
    finally:
        services.start_ray_process = start


@contextmanager
def own_process_groups() -> Iterator[None]:
    """Inside, started Ray processes get process groups of their own. `timeout`, shells and job managers send SIGTERM to
    a program's whole group; the program then saves first, which needs the Ray processes."""
    from ray._private import services

    plain = services.ConsolePopen

    class GroupPopen(plain):  # type: ignore[misc, valid-type]  # Ray ships no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, process_group=0, **kwargs)

    services.ConsolePopen = GroupPopen
    try:
        yield
    finally:
        services.ConsolePopen = plain


def _tell_ports(session_dir: str, node_id: str, ports: Mapping[str, int]) -> bool:
    """Writes the port files that the raylet waits for, in place of agents that start later or never. False: this Ray
    uses no such files, so its agents are left unchanged."""
    from ray import _raylet

    tell = getattr(_raylet, "persist_port", None)
    if tell is None or not all(hasattr(_raylet, name) for name in ports):
        return False
    for name, port in ports.items():
        tell(session_dir, node_id, getattr(_raylet, name), port)
    return True


def lighter_command(command: Sequence[str], agent_stub: str | None, lower: str | None) -> list[str]:
    """Returns the raylet's command with other agents; None keeps an agent as it is.

    Args:
        command: the raylet's command from Ray.
        agent_stub: command of a placeholder for the dashboard agent, without which a raylet does not start.
        lower: program that lowers the priority of the environment agent.
    """
    changes: dict[str, Callable[[str], str]] = {}
    if agent_stub is not None:
        changes[DASHBOARD_FLAG] = lambda _: agent_stub
    if lower is not None:
        changes[ENVIRONMENTS_FLAG] = lambda own: f"{lower} -n {_LOWEST_PRIORITY} {own}"
    return [_changed(part, changes) for part in command]


def _changed(part: str, changes: dict[str, Callable[[str], str]]) -> str:
    for flag, change in changes.items():
        if part.startswith(flag):
            return flag + change(part.removeprefix(flag))
    return part
