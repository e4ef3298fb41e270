"""The cluster as the trainer sees it: the devices of a run, and the worker groups of its roles."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from rlsdk.cluster.batches.batch_ref import BatchRef
from rlsdk.cluster.batches.stored_fields import StoredFields
from rlsdk.cluster.calls.handle import WorkerHandle
from rlsdk.cluster.calls.messages import CreateHost, HostInfo
from rlsdk.cluster.calls.pending import Pending, Request
from rlsdk.cluster.devices.placement import PlacementSpec
from rlsdk.cluster.devices.rank_contexts import WorkerSettings, leading_devices, rank_contexts, rendezvous_address
from rlsdk.cluster.group import Member, WorkerGroup
from rlsdk.cluster.pools import WorkerPools
from rlsdk.cluster.ray_cluster.daemons import check_daemons, dead_daemon
from rlsdk.cluster.ray_cluster.environment import forwarded
from rlsdk.cluster.ray_cluster.local import LocalRay
from rlsdk.cluster.ray_cluster.nodes import connect, run_on_nodes
from rlsdk.cluster.ray_cluster.object_store import RayObjectStore
from rlsdk.cluster.ray_cluster.shared_folder import check_shared_folder
from rlsdk.interfaces import Batch, ConfigError, RankContext, WorkerError
from rlsdk.kit.ranks.object_store import use_store
from rlsdk.system.interrupts import PATIENCE_S, is_interrupt

_GRACE_S = 5.0
"""Seconds for hosts to close."""
_LOOK_S = 0.1
_SHORT_GRACE_S = 1.0
"""Seconds for hosts to close when a worker has failed."""


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """Arguments from which the hosts of a role were built."""

    host: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    py_executable: str | None


class Cluster:
    """A running cluster, made by `start`. Use it as a context manager: all its processes end with it, also after an
    error."""

    def __init__(self, pools: WorkerPools, local: LocalRay | None) -> None:
        self.placement = pools.placement
        self.settings = pools.settings
        self.groups: dict[str, WorkerGroup] = {}
        self._recipes: dict[str, _Recipe] = {}
        self._pools = pools
        self._local = local
        self._closed = False
        self._fields = StoredFields(_put)

    @classmethod
    def start(
        cls,
        placement: PlacementSpec,
        *,
        address: str | None = None,
        num_threads: int | None = None,
        timeout_s: float = 600.0,
        collective_timeout_s: float | None = None,
        log_dir: Path | None = None,
        seed: int = 0,
        preload: Sequence[str] = (),
        interpreters: Mapping[str, str] | None = None,
        forward_env: Sequence[str] = (),
        network_interface: str | None = None,
        shared_folder: Path | None = None,
        before_connect: Callable[[], None] = lambda: None,
    ) -> Cluster:
        """Reserves the devices and starts a worker on each; does not wait for the workers.

        Args:
            placement: which devices, and which role runs where.
            address: of a running Ray cluster (`auto` finds it); None starts one on this machine.
            num_threads: CPU threads of each worker; None: its pool's `cpus_per_device`.
            timeout_s: deadline of every wait that gives none of its own.
            collective_timeout_s: deadline of every collective between the ranks of a group; None: `timeout_s`.
            log_dir: where each worker writes what it prints, a file per device; None: Ray's own folder.
            seed: of the run; handed to every rank.
            preload: modules that every worker imports as soon as it is up, while the controller goes on.
            interpreters: role -> interpreter of another environment, for roles that will have one: their workers start
                at once, and a pool of such roles only has no others.
            forward_env: names and patterns of environment variables that workers of a cluster at `address` get from
                this process; those of a cluster that is started here have all of them anyway.
            network_interface: of every rendezvous; None: the address by which Ray knows a node.
            shared_folder: must be one and the same on all nodes; not looked at where there is one node.
            before_connect: called when the daemons of a cluster that is started here run, before this process connects.

        Raises:
            PlacementError: the cluster does not have what is asked for (shows asked against available), or the folder
                is not shared.
            ConfigError: an interpreter that cannot host a worker, or packages that differ between nodes.
        """
        settings = WorkerSettings(
            timeout_s=timeout_s,
            collective_timeout_s=timeout_s if collective_timeout_s is None else collective_timeout_s,
            num_threads=num_threads,
            seed=seed,
            log_dir=str(log_dir.absolute()) if log_dir else None,
            preload=tuple(preload),
            environment=forwarded(os.environ, forward_env if address is not None else (), network_interface),
            network_interface=network_interface,
        )
        local = connect(
            address,
            placement,
            environments_first=bool(interpreters or settings.environment),
            before_connect=before_connect,
        )
        cluster = cls(WorkerPools(placement, settings), local)
        use_store(RayObjectStore())
        try:
            cluster._pools.start(interpreters or {})
            nodes = cluster._pools.node_ids
            if shared_folder is not None and len(nodes) > 1:
                check_shared_folder(shared_folder, nodes, partial(run_on_nodes, timeout_s=timeout_s))
        except BaseException:
            cluster.close()
            raise
        return cluster

    def put(self, batch: Batch) -> BatchRef:
        """Returns a reference to a batch, which can be passed to any method of any group. Every field is stored once
        however many batches share its tensor, when a call first needs it; nothing of the batch may be written
        meanwhile."""
        return BatchRef.of(batch, self._fields)

    def create_group(
        self,
        role: str,
        host: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        py_executable: str | None = None,
        devices_per_rank: int = 1,
    ) -> WorkerGroup:
        """Makes the hosts of a role, one per rank, in the workers of its pool; waits until all are built.

        Args:
            role: one of the placement's roles.
            host: `package.module:Class`, imported in the workers only. Its constructor takes the `RankContext`, then
                `args` and `kwargs`.
            args: the same for every rank.
            kwargs: the same for every rank.
            py_executable: interpreter of another environment; the role then has its own processes.
            devices_per_rank: devices of one node, or of whole nodes, that a rank spans (an engine that spreads over
                several by itself); its process is that of the first.

        Raises:
            ConfigError: unknown role, a host that is no class path, devices that do not divide, an interpreter that
                cannot host a worker.
            WorkerError: a host could not be built, or its worker died.
            RlsdkError: what a host's constructor raised.
        """
        pool = self.placement.pool_of(role)
        if not all(host.partition(":")):
            raise ConfigError(f"role {role!r}: host {host!r} does not name a class; expected 'package.module:Class'")
        if role in self.groups:
            raise ConfigError(f"role {role!r} already has a group; a role is created once")
        leading = leading_devices(pool, role, devices_per_rank)
        every = self._pools.workers(pool, py_executable)
        workers = [every[device] for device in leading]
        contexts = rank_contexts(
            role,
            pool,
            [worker.known() for worker in every],
            devices_per_rank=devices_per_rank,
            port=self._hold_port(role, workers),
            settings=self.settings,
        )
        recipe = _Recipe(host=host, args=tuple(args), kwargs=dict(kwargs or {}), py_executable=py_executable)
        infos = self._build(recipe, workers, contexts)
        members = [
            Member(worker=worker, ctx=ctx, parallel=infos[ctx.rank].parallel)
            for worker, ctx in zip(workers, contexts, strict=True)
        ]
        group = WorkerGroup(role, members, infos[0].methods, put=self.put, timeout_s=self.settings.timeout_s)
        self.groups[role] = group
        self._recipes[role] = recipe
        return group

    def can_restart(self, role: str) -> bool:
        """Whether its processes host no other role, so that one of them can be restarted."""
        return role in self.groups and self.placement.roles_of(self.placement.pool_of(role).name) == [role]

    def restart(self, role: str, rank: int) -> None:
        """Ends the process of one rank, starts another on its device (where its node is gone all of its devices are
        taken elsewhere), and builds the rank's host there, as it was built first. The other ranks must not be in a
        collective with it: replicas are not.

        Raises:
            WorkerError: the old process could not be ended, or the new one does not come up.
            PlacementError: its node is gone, and no other has room for its devices.
            RlsdkError: what the host's constructor raised.
        """
        assert self.can_restart(role), f"role {role!r} shares its processes"
        group, recipe = self.groups[role], self._recipes[role]
        old = group.members[rank]
        pool = self.placement.pool_of(role)
        devices = range(old.worker.device, old.worker.device + len(old.ctx.bundles))
        workers = self._pools.replace(pool, recipe.py_executable, devices)
        here = [worker.known() for worker in workers]
        ctx = replace(
            old.ctx,
            node=here[0].node,
            accelerators=tuple(name for info in here for name in info.accelerators),
            bundles=self._pools.bundles(pool, devices),
            device_nodes=tuple(info.node for info in here),
        )
        info = self._build(recipe, workers[:1], [ctx])[rank]
        group.replace(rank, Member(worker=workers[0], ctx=ctx, parallel=info.parallel))

    def find_lost(self, wait_s: float) -> str | None:
        """Describes a dead process of the run; None: all are alive. A death may be noticed only after the error that it
        causes, so this waits up to `wait_s` seconds for it."""
        end = time.monotonic() + wait_s
        while True:
            if (daemon := dead_daemon()) is not None:
                return daemon
            for worker in self._pools.every():
                if worker.death() is not None:
                    return worker.where()
            if time.monotonic() > end:
                return None
            time.sleep(_LOOK_S)

    def close(self, *, grace_s: float = _GRACE_S) -> None:
        """Closes every host, ends every worker, releases the devices. Safe to call twice.

        Args:
            grace_s: how long hosts may take to close; after that their processes are killed.
        """
        if self._closed:
            return
        self._closed = True
        import ray

        try:
            if ray.is_initialized() and dead_daemon() is None:
                self._pools.close(grace_s)
        finally:
            use_store(None)
            if self._local is not None:
                self._local.stop()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed_s = _SHORT_GRACE_S if isinstance(error, WorkerError) else _GRACE_S
        self.close(grace_s=PATIENCE_S if is_interrupt(kind) else failed_s)

    def _hold_port(self, role: str, workers: Sequence[WorkerHandle]) -> int:
        """Has rank 0's worker open the rendezvous port of a group; returns 0 for a single rank."""
        if len(workers) == 1:
            return 0
        address = rendezvous_address([worker.known() for worker in workers])
        request = Request(ref=workers[0].actor.hold_port.remote(address), worker=workers[0], role=role, rank=0)
        timeout_s = self.settings.timeout_s
        ports = Pending([request], doing="opening the rendezvous", join=dict, timeout_s=timeout_s).result()
        return int(ports[0])

    def _build(
        self, recipe: _Recipe, workers: Sequence[WorkerHandle], contexts: Sequence[RankContext]
    ) -> dict[int, HostInfo]:
        """Builds all hosts at once; returns each host's own description, by rank."""
        requests = [
            Request(
                ref=worker.create(CreateHost(host=recipe.host, ctx=ctx, args=recipe.args, kwargs=recipe.kwargs)),
                worker=worker,
                role=ctx.role,
                rank=ctx.rank,
            )
            for worker, ctx in zip(workers, contexts, strict=True)
        ]
        timeout_s = self.settings.timeout_s
        infos: dict[int, HostInfo] = Pending(
            requests, doing=f"building {recipe.host}", join=dict, timeout_s=timeout_s
        ).result()
        return infos


def _put(batch: Batch) -> Any:
    import ray

    check_daemons()
    return ray.put(batch)
