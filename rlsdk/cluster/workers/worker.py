"""The process of one device: it hosts every role of its pool as a plain dictionary.

Imports as little as possible: torch and the engines come with the first host.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import io
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlsdk.cluster.batches.batch_ref import StoredRows
from rlsdk.cluster.calls.dispatch import MethodSpec, methods_of
from rlsdk.cluster.calls.messages import Call, CreateHost, Failure, HostInfo, Packed
from rlsdk.cluster.calls.relay import Relayed, StoredAgain, pass_on
from rlsdk.cluster.devices.worker_info import WorkerInfo
from rlsdk.cluster.ray_cluster.environment import choose_gloo_interface
from rlsdk.cluster.ray_cluster.object_store import RayObjectStore
from rlsdk.cluster.workers.companions import RayCompanions
from rlsdk.cluster.workers.engine_thread import EngineThread, run_into
from rlsdk.cluster.workers.scratch import make_scratch_dir
from rlsdk.interfaces import ConfigError, Parallel, nearest
from rlsdk.kit.ranks.companions import use_companions
from rlsdk.kit.ranks.object_store import use_store
from rlsdk.kit.ranks.progress import advance, idle_s
from rlsdk.system.import_path import SAFE_PATH, add_import_folders

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
OVERTAKEN_S = 30.0
"""Longest time, in seconds, that a call for a neighbour waits for the message that names it."""
_CONCURRENT_CALLS = 16

_here: DeviceWorker | None = None


def local_host(worker_id: str, role: str) -> Any | None:
    """The host of a role when it lives in this process under that worker, else None."""
    return _here.hosts.get(role) if _here is not None and _here.worker_id == worker_id else None


class DeviceWorker:
    """One Ray actor: one device, any number of roles."""

    def __init__(
        self,
        worker_id: str,
        num_threads: int,
        uses_gpu: bool,
        log_path: str | None,
        import_paths: Sequence[str],
        preload: Sequence[str],
        network_interface: str | None = None,
    ) -> None:
        """Does all slow work on the engine thread, so that the process answers as soon as it is up."""
        import ray

        global _here
        for variable in THREAD_VARIABLES:
            os.environ[variable] = str(num_threads)
        if not uses_gpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        add_import_folders(import_paths)
        os.environ[SAFE_PATH] = "1"
        choose_gloo_interface(ray.util.get_node_ip_address())
        self.worker_id = worker_id
        self.neighbours: dict[str, Any] = {}
        """Actors of other workers of this node, by worker: those that this one relays to."""
        self.companions = RayCompanions(network_interface)
        self.logs = _redirect_output(log_path)
        self.hosts: dict[str, Any] = {}
        self.methods: dict[str, dict[str, MethodSpec]] = {}
        self.engine = EngineThread()
        self.engine.submit(0, lambda: _import(preload))
        self.scratch_dir = make_scratch_dir()
        use_store(RayObjectStore())
        use_companions(self.companions)
        self.concurrent = ThreadPoolExecutor(_CONCURRENT_CALLS, thread_name_prefix="rlsdk-concurrent")
        _here = self

    async def describe(self) -> WorkerInfo:
        """Answers at once, whatever the engine does."""
        import ray

        address = self.companions.address
        context = ray.get_runtime_context()
        return WorkerInfo(
            worker_id=self.worker_id,
            node_id=context.get_node_id(),
            node=f"{socket.gethostname()}/{address}",
            address=address,
            pid=os.getpid(),
            logs=self.logs,
            accelerators=tuple(context.get_accelerator_ids().get("GPU", ())),
        )

    async def live(self) -> None:
        """Never returns: the reference to its result fails when, and only when, this process is gone."""
        await asyncio.Event().wait()

    async def idle_s(self) -> float:
        """Seconds since the engine thread last gave a sign of progress. Answers at once, whatever the engine does."""
        return idle_s()

    async def hold_port(self, host: str) -> int:
        """Opens the rendezvous of a group whose rank 0 this will be."""
        from rlsdk.kit.ranks.rendezvous import hold_port

        return hold_port(host)

    async def create(self, sequence: int, request: CreateHost) -> HostInfo | Failure:
        """Imports the host class and builds the host, on the engine thread."""
        answer: HostInfo | Failure = await _answer(self.engine.submit(sequence, lambda: self._create(request)))
        return answer

    async def call(self, sequence: int | None, call: Call) -> Any:
        """Runs a method of a host: in sequence on the engine thread, or without one on its own thread.

        Returns:
            The result, or a `Failure`.
        """
        job = lambda: self._call(call, concurrent=sequence is None)  # noqa: E731
        if sequence is not None:
            return await _answer(self.engine.submit(sequence, job))
        future: Future[Any] = Future()
        self.concurrent.submit(run_into, future, job)
        return await _answer(future)

    async def relay(self, relayed: Sequence[Relayed], new: Mapping[str, Any]) -> list[Any]:
        """Calls of workers of this node, this one among them; see `pass_on`.

        Args:
            relayed: the calls.
            new: actors of workers that this one has not heard of yet, by worker.
        """
        self.neighbours.update(new)
        again = StoredAgain()
        return await pass_on(relayed, lambda one: self._send(one, again))

    async def _send(self, one: Relayed, again: StoredAgain) -> Any:
        if one.worker_id == self.worker_id:
            return await self.call(one.sequence, one.call)
        deadline = time.monotonic() + OVERTAKEN_S
        while one.worker_id not in self.neighbours and time.monotonic() < deadline:
            await asyncio.sleep(0.001)  # this message has overtaken the one that brings it: Ray keeps no order here
        return await self.neighbours[one.worker_id].call.remote(one.sequence, await again.call(one.call))

    async def close(self, sequence: int) -> list[Failure]:
        """Closes the hosts, last made first."""
        failures: list[Failure] = await asyncio.wrap_future(self.engine.submit(sequence, self._close))
        return failures

    def _create(self, request: CreateHost) -> HostInfo:
        advance()
        module, _, name = request.host.partition(":")
        host_class = getattr(importlib.import_module(module), name)
        role = request.ctx.role
        if role in self.hosts:
            raise ConfigError(f"role {role!r} already lives in worker {self.worker_id!r}; roles of a pool are distinct")
        ctx = replace(request.ctx, scratch_dir=self.scratch_dir)
        host = host_class(ctx, *request.args, **request.kwargs)
        self.hosts[role] = host
        self.methods[role] = methods_of(host_class)
        default = Parallel(dp_rank=request.ctx.rank, dp_size=request.ctx.world_size)
        return HostInfo(parallel=getattr(host, "parallel", default), methods=self.methods[role])

    def _call(self, call: Call, *, concurrent: bool) -> Any:
        if not concurrent:
            advance()
        methods = self.methods.get(call.role)
        if methods is None:
            raise ConfigError(f"worker {self.worker_id!r} hosts no {call.role!r}; it hosts {sorted(self.hosts)}")
        if call.method not in methods:
            raise ConfigError(f"{call.role} has no method {call.method!r}{nearest(call.method, methods)}")
        if concurrent and not methods[call.method].concurrent:
            raise ConfigError(
                f"{call.role}.{call.method} is not concurrent; declare it with @dispatch(concurrent=True)"
            )
        args = [_loaded(value) for value in call.args]
        kwargs = {name: _loaded(value) for name, value in call.kwargs.items()}
        return getattr(self.hosts[call.role], call.method)(*args, **kwargs)

    def _close(self) -> list[Failure]:
        failures = []
        for role in reversed(list(self.hosts)):
            close = getattr(self.hosts.pop(role), "close", None)
            try:
                if close is not None:
                    close()
            except Exception as error:
                failures.append(Failure.of(error))
        shutil.rmtree(self.scratch_dir, ignore_errors=True)
        return failures


def _import(modules: Sequence[str]) -> None:
    """Imports what a host will need. What cannot be imported is reported when a host really needs it.

    Modules stay: without collections an import takes an eighth less, and later ones need not look through them."""
    gc.disable()
    try:
        for module in modules:
            with suppress(Exception):
                importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def _loaded(value: Any) -> Any:
    return value.load() if isinstance(value, StoredRows | Packed) else value


async def _answer(future: Future[Any]) -> Any:
    """The result of a job, or its exception as plain data."""
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return Failure.of(error)


def _redirect_output(log_path: str | None) -> tuple[str, ...]:
    """Sends what this process prints, C code included, to one file; returns the files that hold it.

    Without a path, or where it cannot be written, output stays in Ray's own files.
    """
    if log_path is not None:
        try:
            Path(log_path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            target = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            print(f"cannot write {log_path!r} ({error}); output stays here", file=sys.stderr)
        else:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(target, 1)
            os.dup2(target, 2)
            os.close(target)
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, io.TextIOWrapper):  # last words must be there when the process is killed
                    stream.reconfigure(line_buffering=True)
            return (log_path,)
    return tuple(path for path in map(_file_behind, (1, 2)) if path is not None)


def _file_behind(descriptor: int) -> str | None:
    try:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return None
    return path if path.startswith("/") and os.path.isfile(path) else None
