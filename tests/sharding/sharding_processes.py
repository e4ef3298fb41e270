"""A train rank in a process of its own, called through a pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from sharding_cases import LocalGroup, TrainHost, dim0_sharded, random_tensors

from rlsdk.interfaces import DeadlineError, WorkerError
from rlsdk.testing.tensor_engines import TensorTrainEngine

Shapes = Mapping[str, tuple[int, ...]]


class MortalHost(TrainHost):
    """A train host whose export number `fatal` (from 0) ends badly: `kill` or `hang`."""

    def __init__(self, engine: TensorTrainEngine, fatal: int | None, end: str) -> None:
        super().__init__(engine)
        self.left, self.end = fatal, end

    def export_weights(self, bucket: Any) -> Mapping[str, Any]:
        handle = super().export_weights(bucket)
        if self.left == 0:
            if self.end == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        self.left = None if self.left is None else self.left - 1
        return handle


def serve(pipe: Connection, shapes: Shapes, rank: int, parts: int, fatal: int | None, end: str) -> None:
    """Body of the process: answers calls until the pipe closes."""
    layout = replace(dim0_sharded(shapes, parts)[rank], process=f"localhost:{os.getpid()}")
    host = MortalHost(TensorTrainEngine(random_tensors(shapes), layout), fatal, end)
    while True:
        try:
            method, args = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            pipe.send((getattr(host, method)(*args), None))
        except Exception as error:
            pipe.send((None, error))


@dataclass
class PipePeer:
    """A rank behind a pipe."""

    pipe: Connection
    lock: threading.Lock

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        with self.lock:
            try:
                self.pipe.send((method, args))
                if not self.pipe.poll(timeout_s):
                    raise DeadlineError(f"no answer to {method} in {timeout_s:.1f} s")
                value, error = self.pipe.recv()
            except (EOFError, ConnectionError) as error:
                raise WorkerError("the process is gone") from error
        if error is not None:
            raise error
        return value

    def local(self) -> None:
        return None

    def __getattr__(self, method: str) -> Any:
        """As a host: every method is a call."""
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *args: self.call(method, *args, timeout_s=30.0)


class PipeGroup(LocalGroup):
    """Ranks in processes of their own."""

    pids: tuple[int, ...] = ()

    def peers(self) -> Any:
        return self.hosts


def weight_files(*pids: int) -> list[str]:
    """Files of weights in /dev/shm that these processes made, and this one."""
    return [
        n for n in os.listdir("/dev/shm") if n.startswith(tuple(f"rlsdk-weights-{p}-" for p in (os.getpid(), *pids)))
    ]


@contextmanager
def train_processes(shapes: Shapes, parts: int, *, fatal: int | None = None, end: str = "") -> Iterator[PipeGroup]:
    """Starts one process per part of the weights; ends them all on the way out."""
    context = multiprocessing.get_context("spawn")
    processes, peers = [], []
    for rank in range(parts):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, shapes, rank, parts, fatal, end), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        peers.append(PipePeer(ours, threading.Lock()))
    try:
        group = PipeGroup(peers)
        group.pids = tuple(process.pid or 0 for process in processes)
        yield group
    finally:
        for peer in peers:
            peer.pipe.close()
        for process in processes:
            process.kill()
            process.join()
            process.close()
