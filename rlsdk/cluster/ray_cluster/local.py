"""A Ray cluster on this machine that lives exactly as long as one run."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import re
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlsdk.cluster.devices.capacity import NodeCapacity, assign_nodes
from rlsdk.cluster.devices.placement import PlacementSpec
from rlsdk.cluster.ray_cluster.access import (
    LOOPBACK,
    TLS,
    check_loopback,
    closed_to_strangers,
    environment,
    read_access_again,
    write_token,
)
from rlsdk.cluster.ray_cluster.agents import free_port, light_agents, own_process_groups
from rlsdk.cluster.ray_cluster.daemons import dead_daemon, watch_daemons
from rlsdk.cluster.ray_cluster.driver import become_driver, check_no_client, own_cluster_variables
from rlsdk.cluster.ray_cluster.watchdog import MARK, RayWatchdog
from rlsdk.interfaces import PlacementError, RlsdkError, WorkerError
from rlsdk.system.import_path import child_environment

_log = logging.getLogger(__name__)

# Of CPython's stable interface: the operating system's handler of a signal, which any thread may read and set.
_getsig = ctypes.pythonapi.PyOS_getsig
_getsig.argtypes, _getsig.restype = (ctypes.c_int,), ctypes.c_void_p
_setsig = ctypes.pythonapi.PyOS_setsig
_setsig.argtypes, _setsig.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p

_STORE_BYTES = 2 << 30
_LEAST_SHARED_BYTES = 256 << 20
_MAPPED_STORE_BYTES = 1 << 30
_STORE_SHARE = 0.3
"""Share of the free shared memory for the object store."""
_STOP_TIMEOUT_S = 15.0
_PROBE_TIMEOUT_S = 2.0
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Events of every call, kept by the gcs for a dashboard that this cluster does not have.
    "RAY_task_events_report_interval_ms": "0",
    # By default workers yield to everything else on the machine; here they are what it is for.
    "RAY_worker_niceness": "0",
    # OpenMP threads that wait by spinning take the processor from those they wait for: on a busy machine a step of
    # two threads took ten times as long.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Workers decide for themselves what they see; unset, older versions print advice on it.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # What an engine started in a worker ends with the worker.
    "RAY_process_group_cleanup_enabled": "1",
}
_LONGEST_PARENT = 20
"""Longest path of the temporary folder, in characters: socket paths inside must stay below 108 bytes."""


class LocalRay:
    """Starts Ray for a placement and connects to it; `stop` ends every process and removes its folder."""

    def __init__(
        self,
        placement: PlacementSpec,
        *,
        environments_first: bool = True,
        before_connect: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts it.

        Args:
            placement: devices that the cluster must have room for.
            environments_first: workers that are started at once ask for an environment or for their own variables.
            before_connect: called when Ray's daemons run, before this process connects to them.

        Raises:
            PlacementError: before anything starts, this machine does not have the devices, or no loopback.
            WorkerError: Ray did not start.
        """
        check_loopback()
        node = this_machine(placement)
        assign_nodes(placement, [node])
        self.folder = tempfile.mkdtemp(prefix="rlsdk-", dir=temporary_parent())
        """Private folder with all files of the cluster."""
        self._watchdog = RayWatchdog(self.folder, child_environment())
        self._node: Any = None
        atexit.register(self.stop)
        try:
            for name, value in _ENVIRONMENT.items():
                os.environ.setdefault(name, value)
            check_no_client()
            token = write_token(self.folder)
            with own_signal_handlers(), deaf_to_hangup(), own_cluster_variables(), closed_to_strangers(token):
                self._start(int(node.cpus), int(node.gpus), environments_first, before_connect)
        except BaseException as error:
            self.stop()
            if isinstance(error, Exception) and not isinstance(error, RlsdkError):
                raise WorkerError(f"Ray did not start on this machine: {_cause(error)}") from error
            raise

    def stop(self) -> None:
        """Safe to call twice."""
        import ray

        atexit.unregister(self.stop)
        if dead_daemon() is None and self._is_reachable():
            ray.shutdown()
            self._watchdog.end(_STOP_TIMEOUT_S)
        else:  # Ray would ask it for a minute.
            self._watchdog.end(_STOP_TIMEOUT_S)
            ray.shutdown()
        watch_daemons({})
        if self._node is not None:
            self._node.kill_all_processes(check_alive=False)
            self._node = None
        read_access_again()

    def _is_reachable(self) -> bool:
        """False: its head was told to end (SIGTERM to all processes of a container, say) and listens no more."""
        if self._node is None:
            return True
        host, _, port = self._node.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), _PROBE_TIMEOUT_S).close()
        except OSError:
            return False
        return True

    def _start(self, cpus: int, gpus: int, environments_first: bool, before_connect: Callable[[], None]) -> None:
        mark = {MARK: self.folder}
        ray_folder = str(Path(self.folder) / "ray")  # Ray lets everybody write into the folder that it is given
        try:
            with environment(mark):
                self._node = _start_lean_node(cpus, gpus, ray_folder, self._watchdog, environments_first)
        except (ImportError, AttributeError, TypeError) as error:
            # Ray's private classes have changed: the public API gives the same cluster, slower to start.
            _log.info("starting Ray the long way, because of %s: %s", type(error).__name__, error)
            before_connect()
            with environment(mark):
                become_driver(
                    address="local",
                    include_dashboard=False,
                    num_cpus=cpus,
                    num_gpus=gpus,
                    object_store_memory=store_bytes(),
                    _temp_dir=ray_folder,
                    _node_ip_address=LOOPBACK,
                )
        else:
            before_connect()
            become_driver(address=self._node.address)
            watch_daemons({name: started[0].process for name, started in self._node.all_processes.items()})


def _start_lean_node(cpus: int, gpus: int, folder: str, watchdog: RayWatchdog, environments_first: bool) -> Any:
    """Starts gcs and raylet without the dashboard server and its agent, autoscaler and log forwarder that `ray.init`
    brings along.

    One run on one machine uses none of them, and they cost more to start than all the rest. Checked with Ray 2.60; it
    rests on private classes, so the caller falls back to `ray.init` where they differ.
    """
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class LeanNode(Node):  # type: ignore[misc]  # Ray ships no types
        def start_api_server(self, **_: Any) -> None:
            self._webui_url = ""

        def start_gcs_server(self) -> None:
            super().start_gcs_server()
            self._hand_over()

        def start_raylet(self, *args: Any, **kwargs: Any) -> None:
            with light_agents(
                self.get_session_dir_path(),
                self.node_id,
                environments_port=port,
                environments_first=environments_first,
            ):
                super().start_raylet(*args, **kwargs)
            self._hand_over()

        def _hand_over(self) -> None:
            for started in self.all_processes.values():
                watchdog.watch(started[0].process.pid)

    port = free_port(LOOPBACK)
    params = RayParams(
        node_ip_address=LOOPBACK,
        num_cpus=cpus,
        num_gpus=gpus,
        object_store_memory=store_bytes(),
        temp_dir=folder,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
        runtime_env_agent_port=port or None,
    )
    with own_process_groups():
        return LeanNode(params, head=True, shutdown_at_exit=False, spawn_reaper=False, ray_init_cluster=True)


def this_machine(placement: PlacementSpec) -> NodeCapacity:
    """Resources of a local cluster: as many logical processors as requested, and this machine's GPUs.

    Processors are not a limit, so that a laptop can host many CPU ranks.
    """
    cpus = float(sum(pool.num_devices * pool.cpus_per_device for pool in placement.pools))
    gpus = float(count_gpus())
    return NodeCapacity(
        node_id="local", address=socket.gethostname(), cpus=cpus, gpus=gpus, total_cpus=cpus, total_gpus=gpus
    )


def count_gpus(folder: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that this process may use, without importing torch or touching a driver. A container may have been
    given any of the machine's: their files keep the machine's numbers."""
    found = len([entry for entry in folder.glob("nvidia*") if re.fullmatch(r"nvidia\d+", entry.name)])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not found:
        return found
    return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])


def store_bytes() -> int:
    """Size of the object store: it is taken from shared memory as it fills, and spills to disk beyond.

    Where shared memory is tiny (64 MB in a container by default) it asks for more than that has: Ray then maps files.
    """
    stats = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    share = int(stats.f_bavail * stats.f_frsize * _STORE_SHARE) if stats else _STORE_BYTES
    return min(_STORE_BYTES, share) if share >= _LEAST_SHARED_BYTES else _MAPPED_STORE_BYTES


def temporary_parent() -> str:
    """The folder for temporary files, or `/tmp` where its path is too long for sockets, or not ASCII, which Ray needs.

    Raises:
        PlacementError: neither can be used.
    """
    parent = tempfile.gettempdir()
    if parent.isascii() and len(parent) <= _LONGEST_PARENT:
        return parent
    if os.access("/tmp", os.W_OK):
        return "/tmp"
    if parent.isascii():
        return parent
    raise PlacementError(
        f"TMPDIR {parent!r}: Ray needs a folder for temporary files whose path is ASCII, and /tmp cannot be written; "
        "set TMPDIR to another folder"
    )


def _cause(error: Exception) -> str:
    """What an error of Ray says, and what to look at where it only says that it waited."""
    said = (str(error).splitlines() or [type(error).__name__])[0]
    if "timed out" not in said.lower():
        return f"{said}. `rlsdk doctor` looks at this machine"
    if os.environ.get(TLS):
        return f"{said} {TLS} is set: are its certificates valid for {LOOPBACK}, the address of a run's own cluster?"
    return f"{said} Is it very busy, or short of memory or processes (ulimit -u)? Then try again; `rlsdk doctor` looks"


@contextmanager
def own_signal_handlers() -> Iterator[None]:
    """Restores the program's SIGTERM handler, which Ray replaces twice: in Python, on the main thread only; and below
    Python, from any thread, by one that prints a stack of C++ and aborts the program if that takes over three seconds.
    """
    before, below = signal.getsignal(signal.SIGTERM), _getsig(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before):
            with suppress(ValueError):  # not the main thread: Ray did not replace it in Python either
                signal.signal(signal.SIGTERM, before)
            _setsig(signal.SIGTERM, below)


@contextmanager
def deaf_to_hangup() -> Iterator[None]:
    """Inside, started processes ignore SIGHUP, which a terminal sends to all its processes when it closes: this process
    finishes its step and saves first, and needs them for that. Ray does the same for Ctrl-C."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
