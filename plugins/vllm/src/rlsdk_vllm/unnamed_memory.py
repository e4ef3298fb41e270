"""Unlinks the names of vLLM's shared memory, so that the memory is freed with the last process that uses it, however
that ends."""

from __future__ import annotations

import functools
import glob
from pathlib import Path
from typing import Any

from vllm.distributed.device_communicators import cpu_communicator, shm_broadcast

SHARED = Path("/dev/shm")


class UnnamedMemory(cpu_communicator._CPUSHMDistributed):  # type: ignore[misc]
    """Shared memory in which workers of tensor parallelism reduce on a CPU. vLLM itself removes the names only when a
    worker ends normally, not by a signal: 4 MB or more per worker would stay in /dev/shm."""

    def _init_cpu_shm(self) -> int:
        handle: int = super()._init_cpu_shm()
        # All workers have mapped all blocks: vLLM waits for that.
        for block in SHARED.glob(f"{glob.escape(self.group_name)}_*"):
            block.unlink(missing_ok=True)
        return handle


def unlink_name(queue: Any) -> None:
    """Unlinks the name of a queue between an engine and a worker, once all readers of this node have mapped it. If a
    signal ends the writer, Python's own resource tracker would do so too, but only after the last process that it
    serves."""
    buffer = queue.buffer
    if buffer is not None and buffer.is_creator:
        buffer.shared_memory.unlink()
        buffer.is_creator = False  # else its end would do it again


@functools.cache
def install() -> None:
    """Patches vLLM so that engines and workers started in this process use unnamed memory."""
    wait_until_ready = shm_broadcast.MessageQueue.wait_until_ready

    def ready_without_name(queue: Any) -> None:
        wait_until_ready(queue)
        unlink_name(queue)

    cpu_communicator._CPUSHMDistributed = UnnamedMemory
    shm_broadcast.MessageQueue.wait_until_ready = ready_without_name
