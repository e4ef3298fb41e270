"""Process groups for tests: one rank in this process, or several processes that rendezvous as in a run."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any

import torch

from rlsdk.interfaces import BackendKind, RankContext, TrainEngine, TrainSpec
from rlsdk.kit.guards.guarded_train import GuardedTrainEngine
from rlsdk.kit.ranks.rendezvous import hold_port
from rlsdk.registry import Registry
from rlsdk.testing.process.modes import kept_modes

GRACE_S = 20.0
START_TIMEOUT_S = 300.0
JOB_TIMEOUT_S = 240.0
SEED = 5


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One rank; a job gets it and builds its engines with it."""

    backend: str
    modules: Sequence[str] = ()
    """Entry modules of plugins that are not installed."""
    device: str = "cpu"
    rank: int = 0
    size: int = 1
    port: int = 0

    def engine(self) -> TrainEngine:
        """An engine that is not initialized."""
        registry = _registry(tuple(self.modules))
        return GuardedTrainEngine(registry.load_engine(registry.backend(BackendKind.TRAIN, self.backend))())

    def start(
        self, spec: TrainSpec, *, role: str = "actor", seed: int = SEED, timeout_s: float = JOB_TIMEOUT_S / 2
    ) -> TrainEngine:
        """Starts an engine on this rank; every rank of the world must start it. Engines in one process need different
        roles."""
        engine = self.engine()
        ctx = RankContext(
            role=role,
            rank=self.rank,
            world_size=self.size,
            local_rank=self.rank,
            device=self.device if self.device == "cpu" else f"cuda:{self.rank}",
            master_port=self.port,
            timeout_s=timeout_s,
            seed=seed,
        )
        try:
            with kept_modes("initialize"):
                engine.initialize(ctx, spec)
        except BaseException:
            engine.close()
            raise
        return engine


@functools.cache
def _registry(modules: tuple[str, ...]) -> Registry:
    """The installed plugins, read once, and these modules."""
    registry = Registry.discover()
    for name in modules:
        registry.register_module(importlib.import_module(name))
    return registry


Job = Callable[..., Any]
"""A picklable function of a `Seat` and its arguments; all ranks run it concurrently."""


class World:
    """A number of ranks, each with its seat. All worlds of one size share their processes, because a job contains
    everything that it needs."""

    def __init__(self, size: int, seat: Seat, *, apart: bool = False) -> None:
        self.size = size
        self.inside = size == 1 and not apart
        """The one rank is this process."""
        self.seats = [replace(seat, rank=rank, size=size) for rank in range(size)]

    def run(self, job: Job, *arguments: Any) -> list[Any]:
        """Runs a job on every rank; returns the results by rank.

        Raises:
            Exception: the exception of the first rank that failed, with its traceback in a note.
            RuntimeError: a rank ended or did not answer in time.
        """
        if self.inside:
            try:
                return [job(self.seats[0], *arguments)]
            finally:
                _keep_imports_out_of_collections()
        return process_pool(self.size).run(job, self.seats, arguments)


class ProcessPool:
    """Processes that run the jobs of worlds of one size. They start with the first job and serve all that follow."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.processes: list[Any] = []
        self.lines: list[Any] = []

    def run(self, job: Job, seats: Sequence[Seat], arguments: Sequence[Any]) -> list[Any]:
        """See `World.run`."""
        if not self.processes:
            self._start(seats)
        self._send(0, None)
        port = self._answers([0], START_TIMEOUT_S)[0]
        for rank, seat in enumerate(seats):
            self._send(rank, (job, replace(seat, port=port), arguments))
        answers = self._answers(range(self.size), JOB_TIMEOUT_S)
        return [answers[rank] for rank in range(self.size)]

    def close(self) -> None:
        """Ends the processes."""
        atexit.unregister(self.close)
        for line in self.lines:
            line.close()
        for process in self.processes:
            process.join(20)
            process.kill()
            process.join()
        self.processes, self.lines = [], []

    def _start(self, seats: Sequence[Seat]) -> None:
        atexit.register(self.close)
        for rank, seat in enumerate(seats):
            context = start_context(rank, module_of(seat), seat.device)
            mine, theirs = context.Pipe()
            # Not a daemon: engines may start processes themselves.
            process = context.Process(target=_serve, args=(theirs,), name=f"rank-{rank}")
            process.start()
            theirs.close()
            self.processes.append(process)
            self.lines.append(mine)

    def _send(self, rank: int, message: Any) -> None:
        self.lines[rank].send_bytes(pickle.dumps(message))

    def _answers(self, ranks: Sequence[int], timeout_s: float) -> dict[int, Any]:
        """Answers of these ranks. When one fails, the others get only a little more time: they may wait for it."""
        answers: dict[int, Any] = {}
        failed: BaseException | None = None
        ended = False
        deadline = time.monotonic() + timeout_s
        waiting = {self.lines[rank]: rank for rank in ranks}
        while waiting and (ready := wait(list(waiting), max(deadline - time.monotonic(), 0))):
            for line in ready:
                rank = waiting.pop(line)
                try:
                    kind, answers[rank], trace = pickle.loads(line.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    ended = True
                    kind, answers[rank], trace = "error", RuntimeError(f"rank {rank} ended"), ""
                if kind == "error" and failed is None:
                    failed = answers[rank]
                    failed.add_note(f"on rank {rank} of {self.size}:\n{trace}")
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if waiting or ended:
            self.close()
        if waiting:
            failed = failed or RuntimeError(f"ranks {sorted(waiting.values())} gave no answer in {timeout_s:g} s")
        if failed is not None:
            raise failed
        return answers


def start_context(rank: int, module: str, device: str = "cpu") -> Any:
    """How the process of a rank starts: the first rank from nothing, the others as copies of a process that has already
    imported the engine, which can take ten seconds. Strings have other hashes in the first than in the others: an
    engine whose ranks iterate over a set in different orders does not pass by luck.

    Args:
        rank: the rank in its world.
        module: module of the engine's class.
        device: device of the world. A process that may have started CUDA cannot be copied.
    """
    if rank == 0 or device != "cpu":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Only the first call counts: the process that is copied lives until this one ends.
    context.set_forkserver_preload([__name__, module])
    return context


def module_of(seat: Seat) -> str:
    """Module of the engine's class."""
    return _registry(tuple(seat.modules)).backend(BackendKind.TRAIN, seat.backend).engine.partition(":")[0]


_PROCESS_POOLS: dict[int, ProcessPool] = {}


def process_pool(size: int) -> ProcessPool:
    """The processes of all worlds of this size, shared by all suites."""
    return _PROCESS_POOLS.setdefault(size, ProcessPool(size))


def close_process_pools() -> None:
    """Ends the processes of all worlds; a later job starts new ones."""
    for one in _PROCESS_POOLS.values():
        one.close()


@functools.cache
def _keep_imports_out_of_collections() -> None:
    """Excludes imported objects from garbage collection; called once, after the first job. Engines collect garbage when
    they close, and scanning all objects of torch and transformers each time took six sevenths of a suite's time."""
    gc.collect()
    gc.freeze()


def _serve(line: Any) -> None:
    """Main function of a rank: provides ports and runs jobs until its pipe is closed."""
    torch.set_num_threads(1)
    while True:
        try:
            message = line.recv_bytes()
        except (EOFError, OSError):
            return
        answer = _answered(message)
        line.send_bytes(pickle.dumps(answer))


def _answered(message: bytes) -> tuple[str, Any, str]:
    """The result of a message, or the exception; a message that cannot be unpickled does not end the process."""
    try:
        asked = pickle.loads(message)
    except Exception as error:
        return ("error", RuntimeError(f"a job that cannot be read: {error}"), traceback.format_exc())
    if asked is None:
        return ("result", hold_port("127.0.0.1"), "")
    job, seat, arguments = asked
    answer = _ran(job, seat, arguments)
    _keep_imports_out_of_collections()
    return answer


def _ran(job: Job, seat: Seat, arguments: Sequence[Any]) -> tuple[str, Any, str]:
    try:
        return ("result", job(seat, *arguments), "")
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return ("error", RuntimeError(f"{type(error).__name__}: {error}"), traceback.format_exc())
        return ("error", error, traceback.format_exc())
