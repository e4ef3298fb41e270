"""The processes between which `reshard_move` moves weights: plain ones, so that only the sync itself is measured.

A training process holds the `Shard(0)` boxes that FSDP would give its rank; a rollout process holds one tensor-parallel
part of a model and copies into it in place, as an engine copies into its parameters. Both run the product's own
`WeightSource` and `WeightTarget`. Calls between them go through Unix sockets; or, where Ray's object store is measured,
between Ray actors; or, for views within a process, nowhere: then all of them live in the caller's.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsdk.cluster.ray_cluster.object_store import RayObjectStore
from rlsdk.interfaces import Bucket, QuantizedPiece, Relay, SyncReceipt, Transfer, WeightLayout, WeightShard
from rlsdk.kit.ranks.object_store import use_store
from rlsdk.kit.ranks.shared_memory import SHARED_WEIGHTS, share
from rlsdk.sharding import WeightSource, WeightTarget
from rlsdk.testing.sharding.tensor_engines import TensorRolloutEngine, TensorTrainEngine

MEMCPY_BYTES = 256 << 20
"""Of the buffer that the yardstick copies from, over and over: more than any cache holds."""


class InPlaceEngine(TensorRolloutEngine):
    """Copies what comes into memory that stays; fingerprints it only if asked to."""

    prove = True

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        places = {name: (box, tensor) for name, box, tensor in self.served}
        num_bytes = 0
        for shard in shards:
            box, tensor = places[shard.name]
            tensor[shard.box.slices(within=box)].copy_(shard.tensor)
            num_bytes += shard.tensor.nbytes
        self.version = version
        prints = self.fingerprints() if self.prove else {}
        return SyncReceipt(version=version, num_tensors=len(places), num_bytes=num_bytes, fingerprints=prints)


def _status(key: str) -> int:
    """Bytes, of this process, from the kernel."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found.group(1)) * 1024 if found else 0


def _mapped_weights() -> int:
    """Bytes of the sources' own weights that this process has mapped: memory that nobody took for the move."""
    resident, counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            counted = SHARED_WEIGHTS in line
        elif counted and line.startswith("Rss:"):
            resident += int(line.split()[1]) * 1024
    return resident


class Watched:
    """What both kinds of process answer besides: peak memory since it was last asked to begin."""

    resident = 0

    def begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # The peak starts anew from what is resident now.
        self.resident = _status("VmRSS") - _mapped_weights()

    def peak_extra_bytes(self) -> int:
        return _status("VmHWM") - _mapped_weights() - self.resident


class TrainProcess(Watched):
    """One training rank."""

    def __init__(self, layout: WeightLayout) -> None:
        here = replace(layout, process=f"{layout.node}:{os.getpid()}")
        held = {meta.name: torch.ones(meta.shape, dtype=getattr(torch, meta.dtype)) for meta in layout.tensors}
        self.engine = TensorTrainEngine(held, here)
        self.source = WeightSource(self.engine)

    def weight_layout(self) -> WeightLayout:
        return self.source.layout()

    def export_weights(self, buckets: Sequence[Bucket], sync: str = "") -> Sequence[Mapping[str, Any]]:
        return self.source.export(buckets, sync)

    def weight_fingerprints(self, transfers: Sequence[Transfer]) -> Mapping[str, int]:
        return self.source.fingerprints(transfers)

    def weight_block_maxima(self, pieces: Sequence[QuantizedPiece]) -> Sequence[NDArray[np.float32]]:
        return self.source.block_maxima(pieces)

    def weight_block_fingerprints(
        self, pieces: Sequence[QuantizedPiece], maxima: Sequence[NDArray[np.float32]]
    ) -> Mapping[str, int]:
        return self.source.block_fingerprints(pieces, maxima)

    def optim_step(self) -> None:
        self.engine.optim_step()

    def keep_weights_shared(self, yes: bool) -> None:
        """In memory that rollout processes can map, as engines on CPUs keep them, or in private memory."""
        held = [tensor for _, _, tensor in self.engine.held]
        moved = share(held) if yes else [tensor.clone() for tensor in held]
        self.engine.held = [(name, box, t) for (name, box, _), t in zip(self.engine.held, moved, strict=True)]


class RolloutProcess(Watched):
    """One tensor-parallel rank of a replica."""

    def __init__(self, layout: WeightLayout) -> None:
        self.engine = InPlaceEngine([replace(layout, process=f"{layout.node}:{os.getpid()}")])
        self.target = WeightTarget(self.engine)
        self.yardstick = torch.ones(MEMCPY_BYTES, dtype=torch.uint8)

    def target_layouts(self) -> Sequence[WeightLayout]:
        return self.target.layouts()

    def pull_weights(
        self,
        buckets: Sequence[Bucket],
        peers: Mapping[int, Remote],
        version: int,
        timeout_s: float,
        relay: Relay | None = None,
    ) -> SyncReceipt:
        return self.target.pull(buckets, peers, version, timeout_s, relay)

    def pass_on_weights(self, buckets: Sequence[Bucket], sync: str, timeout_s: float) -> Sequence[Mapping[str, Any]]:
        return self.target.pass_on(buckets, sync, timeout_s)

    def prove(self, yes: bool) -> None:
        self.engine.prove = yes

    def memcpy(self) -> float:
        """Seconds to copy as many bytes as this process serves into where it serves them."""
        start, at = time.perf_counter(), 0
        for _, _, tensor in self.engine.served:
            flat = tensor.view(-1).view(torch.uint8)
            for first in range(0, len(flat), MEMCPY_BYTES // 4):
                part: Tensor = flat[first : first + MEMCPY_BYTES // 4]
                at = 0 if at + len(part) > MEMCPY_BYTES else at
                part.copy_(self.yardstick[at : at + len(part)])
                at += len(part)
        return time.perf_counter() - start


@dataclass
class Remote:
    """A process, callable from any other. Satisfies `rlsdk.interfaces.Peer`."""

    address: str
    _idle: list[Connection] = field(default_factory=list)

    def __reduce__(self) -> tuple[type[Remote], tuple[str]]:
        return Remote, (self.address,)

    def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        pipe = self._idle.pop() if self._idle else _connect(self.address)
        pipe.send((method, args))
        if not pipe.poll(timeout_s):
            raise TimeoutError(f"{self.address} did not answer {method} in {timeout_s} s")
        value, error = pipe.recv()
        self._idle.append(pipe)
        if error is not None:
            raise error
        return value

    def local(self) -> None:
        return None


def _connect(address: str) -> Connection:
    for _ in range(2400):
        try:
            return Client(address, "AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.05)
    raise TimeoutError(f"no process listens at {address}")


@dataclass(frozen=True)
class RemoteGroup:
    """Processes of one role. Satisfies `rlsdk.interfaces.EngineGroup`."""

    remotes: Sequence[Any]
    backend: str = "plain"
    capabilities: frozenset[str] = frozenset()

    def run(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        return self.run_each(method, [args] * len(self.remotes), timeout_s)

    def run_each(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        with ThreadPoolExecutor(len(self.remotes)) as pool:
            answers = [
                pool.submit(remote.call, method, *args, timeout_s=timeout_s)
                for remote, args in zip(self.remotes, arguments, strict=True)
            ]
            return [answer.result() for answer in answers]

    def peers(self) -> Sequence[Any]:
        return self.remotes


@dataclass(frozen=True)
class Here:
    """A rank in this very process. Satisfies `rlsdk.interfaces.Peer`."""

    host: Any

    def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        return getattr(self.host, method)(*args)

    def local(self) -> Any:
        return self.host


@dataclass(frozen=True)
class RayRemote:
    """A rank in a Ray actor. Satisfies `rlsdk.interfaces.Peer`."""

    actor: Any

    def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        import ray

        return ray.get(self.actor.call.remote(method, *args), timeout=timeout_s)

    def local(self) -> None:
        return None


class InActor:
    """What a Ray actor holds: one of the two kinds of process."""

    def __init__(self, kind: type[Any], layout: WeightLayout, threads: int) -> None:
        self.threads = threads
        use_store(RayObjectStore())
        torch.set_num_threads(threads)
        self.host = kind(layout)

    def call(self, method: str, *args: Any) -> Any:
        torch.set_num_threads(self.threads)
        return getattr(self.host, method)(*args)


def serve(kind: type[Any], layout: WeightLayout, address: str, threads: int) -> None:
    """Body of a process: answers every connection in a thread of its own."""
    torch.set_num_threads(threads)
    host = kind(layout)
    listener = Listener(address, "AF_UNIX")
    while True:
        threading.Thread(target=_answer, args=(host, listener.accept(), threads), daemon=True).start()


def _answer(host: Any, pipe: Connection, threads: int) -> None:
    torch.set_num_threads(threads)
    while True:
        try:
            method, args = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            pipe.send((getattr(host, method)(*args), None))
        except Exception as error:
            pipe.send((None, error))


@contextmanager
def here(
    train: Sequence[WeightLayout], rollout: Sequence[WeightLayout], folder: Path, threads: int
) -> Iterator[tuple[RemoteGroup, RemoteGroup]]:
    """All of them in this process."""
    torch.set_num_threads(threads)
    yield (
        RemoteGroup([Here(TrainProcess(layout)) for layout in train]),
        RemoteGroup([Here(RolloutProcess(layout)) for layout in rollout]),
    )


@contextmanager
def actors(
    train: Sequence[WeightLayout], rollout: Sequence[WeightLayout], folder: Path, threads: int
) -> Iterator[tuple[RemoteGroup, RemoteGroup]]:
    """One Ray actor per layout, on a Ray of their own."""
    import ray

    ray.init(num_cpus=len(train) + len(rollout), include_dashboard=False, log_to_driver=False)
    use_store(RayObjectStore())
    try:
        kind = ray.remote(num_cpus=1, max_concurrency=8)(InActor)
        yield (
            RemoteGroup([RayRemote(kind.remote(TrainProcess, layout, threads)) for layout in train]),
            RemoteGroup([RayRemote(kind.remote(RolloutProcess, layout, threads)) for layout in rollout]),
        )
    finally:
        use_store(None)
        ray.shutdown()


@contextmanager
def processes(
    train: Sequence[WeightLayout], rollout: Sequence[WeightLayout], folder: Path, threads: int
) -> Iterator[tuple[RemoteGroup, RemoteGroup]]:
    """Starts one process per layout; ends them all on the way out."""
    context = multiprocessing.get_context("spawn")
    started, groups = [], []
    for kind, layouts in ((TrainProcess, train), (RolloutProcess, rollout)):
        addresses = [str(folder / f"{kind.__name__}-{rank}") for rank in range(len(layouts))]
        for layout, address in zip(layouts, addresses, strict=True):
            process = context.Process(target=serve, args=(kind, layout, address, threads), daemon=True)
            process.start()
            started.append(process)
        groups.append(RemoteGroup([Remote(address) for address in addresses]))
    try:
        yield groups[0], groups[1]
    finally:
        for process in started:
            process.kill()
            process.join()
