"""The devices of a run and the processes on them."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rlsdk.cluster.calls.handle import WorkerHandle
from rlsdk.cluster.calls.pending import Pending, Request
from rlsdk.cluster.devices.placement import PlacementSpec, PoolSpec
from rlsdk.cluster.devices.rank_contexts import WorkerSettings
from rlsdk.cluster.ray_cluster.interpreter import check_interpreter, check_nodes
from rlsdk.cluster.ray_cluster.nodes import choose_nodes, find_down, run_on_nodes
from rlsdk.cluster.workers.worker import DeviceWorker
from rlsdk.interfaces import PlacementError, WorkerError
from rlsdk.system.import_path import import_folders

_log = logging.getLogger(__name__)

_READY_TIMEOUT_S = 60.0
"""Seconds to wait for placement groups and worker processes that Ray has accepted."""
_DEATH_TIMEOUT_S = 20.0
"""Seconds for a killed process to be gone."""
_SHORT_GRACE_S = 1.0
"""Seconds for hosts to close after a worker died: the others probably hang in a collective with it."""
_GPU_SHARE = 0.125
"""Share of its device that a worker claims in Ray: up to eight environments may each have a process there."""
_MAX_CALLS = 10_000
"""Largest number of unanswered calls per worker; far above what a run sends."""


class WorkerPools:
    """Holds a placement group per pool, a bundle per device, and the workers in them by interpreter."""

    def __init__(self, placement: PlacementSpec, settings: WorkerSettings) -> None:
        self.placement = placement
        self.settings = settings
        self._nodes: dict[str, tuple[str, ...]] = {}
        self._reserved: dict[str, Any] = {}
        self._moved: dict[tuple[str, int], tuple[Any, int]] = {}
        """Replacement of devices whose node is gone: placement group and bundle of each new device."""
        self._extra: list[Any] = []
        """Placement groups reserved after a node was lost."""
        self._workers: dict[tuple[str, str | None], list[WorkerHandle]] = {}
        self._lock = threading.Lock()
        """Held while workers are made and while all are ended, so that none is made after the end."""
        self._closed = False

    def start(self, interpreters: Mapping[str, str]) -> None:
        """Reserves every device and starts the workers on each that its roles need, without waiting for them.

        Args:
            interpreters: role -> interpreter, for roles of another environment.

        Raises:
            PlacementError: the cluster does not have the devices, or does not give them.
            ConfigError: an interpreter cannot host a worker, or packages differ between nodes.
        """
        self._nodes = choose_nodes(self.placement)
        plain: dict[str, None] = {}
        for pool in self.placement.pools:
            self._reserved[pool.name] = _reserve(pool, self._nodes[pool.name])
            roles = self.placement.roles_of(pool.name)
            for py_executable in dict.fromkeys(interpreters.get(role) for role in roles) or {None: None}:
                if py_executable is None:
                    plain |= dict.fromkeys(self._nodes[pool.name])
                else:
                    check_interpreter(py_executable, set(self._nodes[pool.name]))
                self._workers[pool.name, py_executable] = self._start_workers(pool, py_executable)
        self._check_equal(list(plain))
        deadline = time.monotonic() + _READY_TIMEOUT_S
        for name, group in self._reserved.items():
            if not group.wait(max(deadline - time.monotonic(), 0.1)):
                raise PlacementError(
                    f"pool {name!r} was free when asked for but not given within {_READY_TIMEOUT_S:g} s; somebody "
                    "else took the devices, or a node has died: see `ray status`"
                )

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Every node of the run, each once."""
        return tuple(dict.fromkeys(node for nodes in self._nodes.values() for node in nodes))

    def workers(self, pool: PoolSpec, py_executable: str | None) -> list[WorkerHandle]:
        """The workers of a pool under one interpreter, in device order; waits until they are up.

        Raises:
            ConfigError: the interpreter cannot host a worker.
            WorkerError: a worker did not start.
        """
        key = (pool.name, py_executable)
        if key not in self._workers:
            check_interpreter(py_executable or sys.executable, set(self._nodes[pool.name]))
            self._workers[key] = self._start_workers(pool, py_executable)
        _await_ready(self._workers[key], max(_READY_TIMEOUT_S, self.settings.timeout_s))
        return self._workers[key]

    def replace(self, pool: PoolSpec, py_executable: str | None, devices: Sequence[int]) -> list[WorkerHandle]:
        """Ends the worker on the first of these devices and starts another there, with nothing in it; waits until it
        is up. Returns the workers of all of them.

        Devices of a node that is gone are taken on another node, all of them together, with their own workers: as
        many of one node as they were before. They are reserved as a group of their own: bundles of the group that the
        run began with stay where they were. So where only one of several nodes is lost, the others' are not used.

        Args:
            pool: of the devices.
            py_executable: interpreter of their environment; None: this one.
            devices: numbers in the pool of devices that belong together.

        Raises:
            WorkerError: an old one could not be ended, a new one did not start, or all workers were ended meanwhile.
            PlacementError: a node is gone, and there is no room elsewhere.
            ConfigError: the node in its place has other packages.
        """
        workers = self._workers[pool.name, py_executable]
        workers[devices[0]].end(_DEATH_TIMEOUT_S)
        lost = find_down(dict.fromkeys(workers[device].known().node_id for device in devices))
        if lost:
            for device in devices[1:]:
                workers[device].end(_DEATH_TIMEOUT_S)
            moved = self._move(pool, devices, lost)
            nodes = [node for node in dict.fromkeys([*self._nodes[pool.name], *moved]) if node not in lost]
            if py_executable is None:
                self._check_equal(nodes)
            else:
                check_interpreter(py_executable, set(nodes))
        with self._lock:
            if self._closed:
                raise WorkerError(f"pool {pool.name!r} was closed")
            for device in devices if lost else devices[:1]:
                workers[device] = self._start_worker(pool, device, py_executable)
        found = [workers[device] for device in devices]
        _await_ready(found, max(_READY_TIMEOUT_S, self.settings.timeout_s))
        return found

    def bundles(self, pool: PoolSpec, devices: Sequence[int]) -> tuple[int, ...]:
        """Bundle indices of these devices in their current placement group."""
        return tuple(self._reservation(pool, device)[1] for device in devices)

    def every(self) -> list[WorkerHandle]:
        """All started workers, including those that are not up yet."""
        return [worker for pool in self._workers.values() for worker in pool]

    def close(self, grace_s: float) -> None:
        """Gives hosts `grace_s` seconds to close, ends every worker, releases the devices."""
        import ray

        with self._lock:
            self._closed = True
        workers = [worker for pool in self._workers.values() for worker in pool]
        _close_hosts([worker for worker in workers if worker.info is not None], grace_s)
        for worker in workers:
            worker.kill()
        for group in [*self._reserved.values(), *self._extra]:
            ray.util.remove_placement_group(group)

    def _check_equal(self, nodes: Sequence[str]) -> None:
        """Raises: ConfigError: packages differ between nodes."""
        if len(nodes) > 1:
            check_nodes(nodes, partial(run_on_nodes, timeout_s=self.settings.timeout_s, in_own_process=False))

    def _move(self, pool: PoolSpec, devices: Sequence[int], lost: Sequence[str]) -> Sequence[str]:
        """Reserves these devices on other nodes than those that are gone; returns these nodes."""
        by_node = Counter(pool.node_of_device[device] for device in devices)
        like = PoolSpec(
            name=pool.name,
            devices_per_node=tuple(by_node.values()),
            device=pool.device,
            cpus_per_device=pool.cpus_per_device,
        )
        nodes = choose_nodes(PlacementSpec(pools=(like,), roles={}), without=lost)[pool.name]
        group = _reserve(like, nodes)
        self._extra.append(group)
        if not group.wait(_READY_TIMEOUT_S):
            raise PlacementError(f"pool {pool.name!r}: what takes the place of {len(devices)} device(s) of a lost node "
                                 f"was not given within {_READY_TIMEOUT_S:g} s")  # fmt: skip
        self._moved |= {(pool.name, device): (group, at) for at, device in enumerate(devices)}
        return nodes

    def _reservation(self, pool: PoolSpec, device: int) -> tuple[Any, int]:
        """Placement group of a device, and its bundle there."""
        return self._moved.get((pool.name, device)) or (self._reserved[pool.name], device)

    def _start_workers(self, pool: PoolSpec, py_executable: str | None) -> list[WorkerHandle]:
        return [self._start_worker(pool, device, py_executable) for device in range(pool.num_devices)]

    def _start_worker(self, pool: PoolSpec, device: int, py_executable: str | None) -> WorkerHandle:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        environment = "" if py_executable is None else f"-env{len(self._workers)}"
        name = f"{pool.name}-{device}{environment}"
        worker_id = f"{name}-{uuid.uuid4().hex}"
        own: dict[str, Any] = {"py_executable": py_executable} if py_executable else {}
        if self.settings.environment:
            own["env_vars"] = dict(self.settings.environment)
        group, index = self._reservation(pool, device)
        bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        options = {
            "num_cpus": 0,
            "num_gpus": _GPU_SHARE if pool.device == "cuda" else 0,
            "max_concurrency": _MAX_CALLS,
            "scheduling_strategy": bundle,
            **({"runtime_env": own} if own else {}),
        }
        actor = (
            ray.remote(DeviceWorker)
            .options(**options)
            .remote(
                worker_id=worker_id,
                num_threads=self.settings.threads(pool),
                uses_gpu=pool.device == "cuda",
                log_path=os.path.join(self.settings.log_dir, f"{name}.log") if self.settings.log_dir else None,
                import_paths=_import_paths(own=py_executable is None),
                preload=self.settings.preload,
                network_interface=self.settings.network_interface,
            )
        )
        return WorkerHandle(actor, worker_id, pool.name, device)


def _import_paths(*, own: bool) -> list[str]:
    """Import paths for workers, so that they can import what the controller can, such as a user's loss in the working
    folder. Workers of another environment (not `own`) get no environment's folders, which would bring its packages."""
    paths = import_folders()
    if own:
        return paths
    prefixes = tuple({os.path.join(prefix, "") for prefix in (sys.prefix, sys.base_prefix)})
    return [path for path in paths if not path.startswith(prefixes) and "site-packages" not in path.split(os.sep)]


def _reserve(pool: PoolSpec, nodes: Sequence[str]) -> Any:
    """Asks for a pool's placement group: a bundle per device, each on the node chosen for it."""
    import ray

    bundle = {"CPU": float(pool.cpus_per_device)} | ({"GPU": 1.0} if pool.device == "cuda" else {})
    return ray.util.placement_group(
        [dict(bundle) for _ in range(pool.num_devices)],
        strategy="PACK",
        bundle_label_selector=[{"ray.io/node-id": nodes[at]} for at in pool.node_of_device],
    )


def _await_ready(workers: Sequence[WorkerHandle], timeout_s: float) -> None:
    """Waits until the processes are up, and records their nodes."""
    new = [worker for worker in workers if worker.info is None]
    requests = [
        Request(ref=worker.actor.describe.remote(), worker=worker, role=f"worker of pool {worker.pool!r}", rank=at)
        for at, worker in enumerate(new)
    ]
    infos = Pending(requests, doing="starting", join=dict, timeout_s=timeout_s).result()
    for at, worker in enumerate(new):
        worker.info = infos[at]


def _close_hosts(workers: Sequence[WorkerHandle], grace_s: float) -> None:
    """Asks hosts to close. The caller ends those that do not answer in time."""
    import ray

    alive = [worker for worker in workers if worker.death() is None]
    refs = [worker.close() for worker in alive]
    if len(alive) < len(workers):
        grace_s = min(grace_s, _SHORT_GRACE_S)
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=grace_s) if refs else ([], [])
    for ref in ready:
        try:
            for failure in ray.get(ref):
                _log.warning("a host failed to close: %s", failure.summary)
        except ray.exceptions.RayError as error:
            _log.debug("a worker ended while closing: %s", error)
