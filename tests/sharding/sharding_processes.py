"""A train rank in a process of its own, called through a pipe."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from sharding_cases import dim0_sharded, random_tensors

from rlsdk.interfaces import DeadlineError, WorkerError
from rlsdk.kit.ranks.shared_memory import share
from rlsdk.sharding.transfer import source as source_module
from rlsdk.sharding.transports.transport import Outgoing
from rlsdk.testing.sharding.local_groups import LocalGroup, TrainHost
from rlsdk.testing.sharding.tensor_engines import TensorTrainEngine

_CLONE_NEWNET = 0x40000000
Shapes = Mapping[str, tuple[int, ...]]


class MortalHost(TrainHost):
    """A train host that ends badly, by `kill` or `hang`, when it has the bucket number `fatal` (from 0) to send."""

    def __init__(self, engine: TensorTrainEngine, fatal: int | None, end: str) -> None:
        super().__init__(engine)
        self.left, self.end = fatal, end
        make = source_module.Outgoing.of

        def mortal(shards: Any, dtypes: Any) -> Outgoing:
            made = make(shards, dtypes)
            return replace(made, take=lambda: self._survive(made))

        source_module.Outgoing = SimpleNamespace(of=mortal)  # type: ignore[attr-defined,assignment]

    def move_weights(self) -> None:
        """As an engine that gives its memory back, and takes other memory later."""
        engine: TensorTrainEngine = self.engine  # type: ignore[assignment]
        engine.held = [(name, box, tensor.clone()) for name, box, tensor in engine.held]

    def _survive(self, bucket: Outgoing) -> Any:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                if self.end == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
        return bucket.take()


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a process lives and ends."""

    fatal: int | None = None
    """Number of the bucket, from 0, which it does not send any more."""
    end: str = ""
    """`kill` or `hang`."""
    own_network: bool = False
    shared: bool = False
    """Keeps its weights where other processes can read them."""


def serve(pipe: Connection, shapes: Shapes, rank: int, parts: int, way: Way) -> None:
    """Body of the process: answers calls until the pipe closes."""
    if way.own_network and ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    layout = replace(dim0_sharded(shapes, parts)[rank], process=f"localhost:{os.getpid()}")
    engine = TensorTrainEngine(random_tensors(shapes), layout)
    if way.shared:
        moved = share([tensor for _, _, tensor in engine.held])
        engine.held = [(name, box, tensor) for (name, box, _), tensor in zip(engine.held, moved, strict=True)]
    host = MortalHost(engine, way.fatal, way.end)
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


@contextmanager
def train_processes(shapes: Shapes, parts: int, **way: Any) -> Iterator[PipeGroup]:
    """Starts one process per part of the weights, `Way(**way)`; ends them all on the way out."""
    context = multiprocessing.get_context("spawn")
    processes, peers = [], []
    for rank in range(parts):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, shapes, rank, parts, Way(**way)), daemon=True)
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


@contextmanager
def cable_to(pid: int) -> Iterator[None]:
    """Joins this network to that of a process that has its own; needs root. Waits until the process has left ours."""
    here, there = f"rlsdk{pid}a", f"rlsdk{pid}b"
    subnet = f"10.{77 + pid % 100}.{pid // 100 % 256}"
    end = time.monotonic() + 120
    while os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        assert time.monotonic() < end, "the process did not leave this network"
        time.sleep(0.01)
    _ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", str(pid))
    try:
        _ip("addr", "add", f"{subnet}.1/24", "dev", here)
        _ip("link", "set", here, "up")
        inside = ("nsenter", "--target", str(pid), "--net", "ip")
        for command in (("addr", "add", f"{subnet}.2/24", "dev", there), ("link", "set", there, "up")):
            subprocess.run([*inside, *command], check=True)
        subprocess.run([*inside, "link", "set", "lo", "up"], check=True)
        yield
    finally:
        _ip("link", "delete", here)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
