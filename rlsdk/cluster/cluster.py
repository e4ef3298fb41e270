"""The devices of a run: pools of workers on Ray, and the groups of roles that live in them."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rlsdk.cluster.batch_ref import BatchRef
from rlsdk.cluster.group import Member, WorkerGroup
from rlsdk.cluster.handle import WorkerHandle
from rlsdk.cluster.interpreter import check_interpreter
from rlsdk.cluster.local import LocalRay
from rlsdk.cluster.messages import CreateHost, HostInfo
from rlsdk.cluster.nodes import choose_nodes, connect
from rlsdk.cluster.pending import Pending, Request
from rlsdk.cluster.placement import PlacementSpec, PoolSpec
from rlsdk.cluster.worker import DeviceWorker
from rlsdk.interfaces import Batch, ConfigError, PlacementError, RankContext, WorkerError

_log = logging.getLogger(__name__)

_READY_TIMEOUT_S = 60.0
"""For what Ray promised to have: placement groups, worker processes."""
_GRACE_S = 5.0
"""For hosts to close."""
_SHORT_GRACE_S = 1.0
"""After a failure of a worker: others probably hang in a collective with it."""
_GPU_SHARE = 0.125
"""Of a worker in its device: up to eight environments may each have a process there."""
_MAX_CALLS = 10_000
"""Unanswered calls per worker; far above what a run sends."""


class Cluster:
    """Use it as a context manager: whatever happens inside, no process stays behind."""

    def __init__(
        self,
        placement: PlacementSpec,
        *,
        num_threads: int | None,
        timeout_s: float,
        log_dir: Path | None,
        seed: int,
        preload: Sequence[str],
    ) -> None:
        self.placement = placement
        self.timeout_s = timeout_s
        self.num_threads = num_threads
        self.log_dir = log_dir
        self.seed = seed
        self.preload = tuple(preload)
        self.groups: dict[str, WorkerGroup] = {}
        self._workers: dict[tuple[str, str | None], list[WorkerHandle]] = {}
        self._placement_groups: dict[str, Any] = {}
        self._nodes: dict[str, tuple[str, ...]] = {}
        self._local: LocalRay | None = None
        self._closed = False

    @classmethod
    def start(
        cls,
        placement: PlacementSpec,
        *,
        address: str | None = None,
        num_threads: int | None = None,
        timeout_s: float = 600.0,
        log_dir: Path | None = None,
        seed: int = 0,
        preload: Sequence[str] = (),
    ) -> Cluster:
        """Takes the devices and starts a worker on each.

        Args:
            placement: which devices, and which role runs where.
            address: of a running Ray cluster (`auto` finds it); None starts one on this machine.
            num_threads: CPU threads of each worker; None: its pool's `cpus_per_device`.
            timeout_s: deadline of every wait that gives none of its own, and of every collective.
            log_dir: where each worker writes what it prints, a file per device; None: Ray's own folder.
            seed: of the run; handed to every rank.
            preload: modules that every worker imports as soon as it is up, while the controller goes on.

        Raises:
            PlacementError: the cluster does not have what is asked for; shows asked against available.
        """
        cluster = cls(
            placement, num_threads=num_threads, timeout_s=timeout_s, log_dir=log_dir, seed=seed, preload=preload
        )
        try:
            cluster._local = connect(address, placement)
            cluster._take_devices()
            for pool in placement.pools:
                cluster._pool_workers(pool, None)
        except BaseException:
            cluster.close()
            raise
        return cluster

    def put(self, batch: Batch) -> BatchRef:
        """Stores a batch once; the reference can be passed to any method of any group."""
        import ray

        return BatchRef(ref=ray.put(batch), lengths=batch.lengths, row_ids=batch["row_id"])

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
            py_executable: interpreter of another environment; the role then has processes of its own.
            devices_per_rank: devices of one node that a rank spans (an engine that spreads over several by itself);
                its process is that of the first.

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
        if py_executable is not None:
            check_interpreter(py_executable, set(self._nodes[pool.name]))
        workers = self._pool_workers(pool, py_executable)
        self._await_ready(workers)
        chosen = _leading_devices(pool, role, devices_per_rank)
        contexts = self._contexts(role, pool, [workers[at] for at in chosen], chosen, devices_per_rank)
        requests = [
            Request(
                ref=workers[at].create(CreateHost(host=host, ctx=ctx, args=tuple(args), kwargs=dict(kwargs or {}))),
                worker=workers[at],
                role=role,
                rank=ctx.rank,
            )
            for at, ctx in zip(chosen, contexts, strict=True)
        ]
        infos: dict[int, HostInfo] = Pending(
            requests, doing=f"building {host}", join=dict, timeout_s=self.timeout_s
        ).result()
        members = [
            Member(worker=workers[at], ctx=ctx, parallel=infos[ctx.rank].parallel)
            for at, ctx in zip(chosen, contexts, strict=True)
        ]
        group = WorkerGroup(role, members, infos[0].methods, put=self.put, timeout_s=self.timeout_s)
        self.groups[role] = group
        return group

    def close(self, *, grace_s: float = _GRACE_S) -> None:
        """Closes every host, ends every worker, gives the devices back. Safe to call twice.

        Args:
            grace_s: how long hosts may take to close; after that their processes are killed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._release(grace_s)
        finally:
            if self._local is not None:
                self._local.stop()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(grace_s=_SHORT_GRACE_S if isinstance(error, WorkerError) else _GRACE_S)

    def _release(self, grace_s: float) -> None:
        """Ends the workers and gives the devices back."""
        import ray

        if not ray.is_initialized():
            return
        workers = [worker for pool in self._workers.values() for worker in pool]
        self._close_hosts(workers, grace_s)
        for worker in workers:
            worker.kill()
        for group in self._placement_groups.values():
            ray.util.remove_placement_group(group)

    def _take_devices(self) -> None:
        """Reserves every device on the node chosen for it."""
        import ray

        nodes = self._nodes = choose_nodes(self.placement)
        for pool in self.placement.pools:
            bundle = {"CPU": float(pool.cpus_per_device)} | ({"GPU": 1.0} if pool.device == "cuda" else {})
            self._placement_groups[pool.name] = ray.util.placement_group(
                [dict(bundle) for _ in range(pool.num_devices)],
                strategy="PACK",
                bundle_label_selector=[{"ray.io/node-id": nodes[pool.name][at]} for at in pool.node_of_device],
            )
        refs = {group.ready(): name for name, group in self._placement_groups.items()}
        _, late = ray.wait(list(refs), num_returns=len(refs), timeout=_READY_TIMEOUT_S)
        if late:
            raise PlacementError(
                f"pools {sorted(refs[ref] for ref in late)} were free when asked for but not given within "
                f"{_READY_TIMEOUT_S:g} s; somebody else took them, or a node has died: see `ray status`"
            )

    def _pool_workers(self, pool: PoolSpec, py_executable: str | None) -> list[WorkerHandle]:
        """The workers of a pool under one interpreter, started when first asked for; does not wait for them."""
        key = (pool.name, py_executable)
        if key not in self._workers:
            self._workers[key] = [self._start_worker(pool, at, py_executable) for at in range(pool.num_devices)]
        return self._workers[key]

    def _start_worker(self, pool: PoolSpec, device: int, py_executable: str | None) -> WorkerHandle:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        environment = "" if py_executable is None else f"-env{len(self._workers)}"
        name = f"{pool.name}-{device}{environment}"
        worker_id = f"{name}-{uuid.uuid4().hex}"
        options: dict[str, Any] = {} if py_executable is None else {"runtime_env": {"py_executable": py_executable}}
        actor = (
            ray.remote(DeviceWorker)
            .options(
                num_cpus=0,
                num_gpus=_GPU_SHARE if pool.device == "cuda" else 0,
                max_concurrency=_MAX_CALLS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._placement_groups[pool.name], placement_group_bundle_index=device
                ),
                **options,
            )
            .remote(
                worker_id=worker_id,
                num_threads=self.num_threads or pool.cpus_per_device,
                # What the controller can import, its own environment's workers can, too: a user's loss in the folder
                # that the command was given in.
                import_paths=[os.path.abspath(path) for path in sys.path] if py_executable is None else [],
                preload=self.preload,
                uses_gpu=pool.device == "cuda",
                log_path=str(self.log_dir.absolute() / f"{name}.log") if self.log_dir else None,
            )
        )
        return WorkerHandle(actor, worker_id, pool.name, device)

    def _await_ready(self, workers: Sequence[WorkerHandle]) -> None:
        """Waits until the processes are up, and learns where they live."""
        new = [worker for worker in workers if worker.info is None]
        requests = [
            Request(ref=worker.actor.describe.remote(), worker=worker, role=f"worker of pool {worker.pool!r}", rank=at)
            for at, worker in enumerate(new)
        ]
        infos = Pending(requests, doing="starting", join=dict, timeout_s=max(_READY_TIMEOUT_S, self.timeout_s)).result()
        for at, worker in enumerate(new):
            worker.info = infos[at]

    def _contexts(
        self,
        role: str,
        pool: PoolSpec,
        workers: Sequence[WorkerHandle],
        devices: Sequence[int],
        devices_per_rank: int,
    ) -> list[RankContext]:
        """Where each rank stands. Rank 0 holds the rendezvous port from here on."""
        infos = [worker.known() for worker in workers]
        one_node = len({info.node_id for info in infos}) == 1
        address, port = "127.0.0.1" if one_node else infos[0].address, 0
        if len(workers) > 1:
            request = Request(ref=workers[0].actor.hold_port.remote(address), worker=workers[0], role=role, rank=0)
            port = Pending([request], doing="opening the rendezvous", join=_only, timeout_s=self.timeout_s).result()
        seen: dict[str, int] = {}
        contexts = []
        for rank, (info, device) in enumerate(zip(infos, devices, strict=True)):
            local_rank = seen.setdefault(info.node_id, 0)
            seen[info.node_id] += 1
            contexts.append(
                RankContext(
                    role=role,
                    rank=rank,
                    world_size=len(workers),
                    local_rank=local_rank,
                    node=info.node,
                    device="cuda:0" if pool.device == "cuda" else "cpu",
                    master_addr=address,
                    master_port=port,
                    num_threads=self.num_threads or pool.cpus_per_device,
                    seed=self.seed,
                    timeout_s=self.timeout_s,
                    bundles=tuple(range(device, device + devices_per_rank)),
                )
            )
        return contexts

    def _close_hosts(self, workers: Sequence[WorkerHandle], grace_s: float) -> None:
        """Gives hosts a moment to leave cleanly; what does not answer is ended anyway."""
        import ray

        started = [worker for worker in workers if worker.info is not None]
        alive = [worker for worker in started if worker.death() is None]
        refs = [worker.close() for worker in alive]
        if len(alive) < len(started):
            grace_s = min(grace_s, _SHORT_GRACE_S)
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=grace_s) if refs else ([], [])
        for ref in ready:
            try:
                for failure in ray.get(ref):
                    _log.warning("a host failed to close: %s", failure.summary)
            except ray.exceptions.RayError as error:
                _log.debug("a worker ended while closing: %s", error)


def _only(answers: Mapping[int, Any]) -> Any:
    return next(iter(answers.values()))


def _leading_devices(pool: PoolSpec, role: str, devices_per_rank: int) -> list[int]:
    """First device of every rank, where a rank takes `devices_per_rank` neighbours of one node."""
    uneven = [count for count in pool.devices_per_node if count % devices_per_rank]
    if uneven:
        raise ConfigError(
            f"{role}: {devices_per_rank} devices a rank do not divide the {uneven[0]} devices that pool {pool.name!r} "
            f"has on a node (devices_per_node {pool.devices_per_node})"
        )
    return list(range(0, pool.num_devices, devices_per_rank))
