"""What weights take from one process to another, beside copying them: `python gpu_move.py DEVICE MIB`.

Both processes are on the same device. The transport is the one that `auto` chooses: the ring through device memory, by
CUDA IPC. Every byte is compared.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import Box, SyncReceipt, TensorMeta, WeightLayout, WeightShard
from rlsdk.sharding.plan.planner import plan_reshard
from rlsdk.sharding.transfer.source import WeightSource
from rlsdk.sharding.transfer.target import WeightTarget
from rlsdk.sharding.transports.table import TRANSPORTS
from rlsdk.testing.sharding.tensor_engines import TensorRolloutEngine, TensorTrainEngine, tensor_layout, whole_boxes

ROWS = 4096
TIMES = 3
"""Syncs after the first, which opens what the others use. The best counts."""
TIMEOUT_S = 120.0


class Served(TensorRolloutEngine):
    """Copies what comes to where it stays."""

    def __init__(self, layout: WeightLayout, memory: dict[str, Tensor]) -> None:
        self._place = layout
        self.memory = memory

    def layout(self) -> Sequence[WeightLayout]:
        return [self._place]

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        for shard in shards:
            self.memory[shard.name][shard.box.slices(Box.whole(tuple(self.memory[shard.name].shape)))].copy_(
                shard.tensor
            )
        finish(next(iter(self.memory.values())).device)
        return SyncReceipt(version=version, num_tensors=len(self.memory), num_bytes=0, fingerprints={})


class Ask:
    """The source, behind a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def local(self) -> None:
        return None

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        self._pipe.send(args)
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"no answer to {method} in {timeout_s:g} s")
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tensors(device: str, mib: int, seed: int) -> dict[str, Tensor]:
    """Of bfloat16, `mib` in all."""
    columns = (mib << 20) // (2 * ROWS * 8)
    generator = torch.Generator().manual_seed(seed)
    made = {f"layer.{at}": torch.randn(ROWS, columns, generator=generator).bfloat16() for at in range(8)}
    return {name: tensor.to(device) for name, tensor in made.items()}


def serve(pipe: Connection, device: str, mib: int) -> None:
    """Body of the source's process: exports what is asked for until the pipe closes."""
    held = tensors(device, mib, seed=1)
    layout = place(held, device)
    source = WeightSource(TensorTrainEngine(held, layout))
    pipe.send(layout)
    try:
        while True:
            asked = pipe.recv()
            try:
                pipe.send(source.export(*asked))
            except Exception as error:  # such as memory that cannot be exported: the sync continues by another way
                pipe.send(error)
    except (EOFError, ConnectionError):
        source.close()


def place(held: dict[str, Tensor], device: str) -> WeightLayout:
    shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
    metas = [TensorMeta(name=name, shape=shape, dtype="bfloat16") for name, shape in shapes.items()]
    return tensor_layout(metas, whole_boxes(shapes), device=device)


def measure(device: str, mib: int) -> dict[str, object]:
    """GB/s of a sync and of a copy on the device; whether all arrived."""
    memory = tensors(device, mib, seed=2)
    target = WeightTarget(Served(place(memory, device), memory))
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, device, mib), daemon=True)
    process.start()
    there.close()
    if not here.poll(TIMEOUT_S):
        raise TimeoutError(f"the source's process did not start within {TIMEOUT_S:g} s")
    source: WeightLayout = here.recv()
    plan = plan_reshard([source], list(target.layouts()), bucket_bytes=64 << 20, transports=TRANSPORTS)
    num_bytes = sum(tensor.nbytes for tensor in memory.values())
    seconds = []
    for version in range(1 + TIMES):
        start = time.perf_counter()
        target.pull(plan.parts[0], {source.rank: Ask(here)}, version, TIMEOUT_S)
        seconds.append(time.perf_counter() - start)
    wanted = tensors(device, mib, seed=1)
    arrived = all(torch.equal(memory[name], tensor) for name, tensor in wanted.items())
    copies = [copied(wanted, memory) for _ in range(1 + TIMES)]
    ways = sorted({bucket.transport for bucket in plan.buckets})
    target.close()
    here.close()
    process.join(TIMEOUT_S)
    return {
        "transport": ", ".join(ways),
        "megabytes": round(num_bytes / 1e6),
        "sync_gb_per_s": round(num_bytes / min(seconds[1:]) / 1e9, 2),
        "first_sync_s": round(seconds[0], 3),
        "device_copy_gb_per_s": round(num_bytes / min(copies[1:]) / 1e9, 2),
        "arrived": arrived,
        "passed": arrived and (device == "cpu" or ways == ["device_ring"]),
    }


def copied(source: dict[str, Tensor], memory: dict[str, Tensor]) -> float:
    device = next(iter(memory.values())).device
    finish(device)
    start = time.perf_counter()
    for name, tensor in source.items():
        memory[name].copy_(tensor)
    finish(device)
    return time.perf_counter() - start


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
    sys.stdout.flush()
    os._exit(0)  # nothing of a transport that hangs may hold the answer up
