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
    """Through which workers of tensor parallelism add up on a CPU. vLLM itself takes its names away when a worker comes
    to its end, which one that is ended by a signal never does: 4 MB a worker, or more, would stay in /dev/shm."""

    def _init_cpu_shm(self) -> int:
        handle: int = super()._init_cpu_shm()
        # All workers have mapped all blocks: vLLM waits for that.
        for block in SHARED.glob(f"{glob.escape(self.group_name)}_*"):
            block.unlink(missing_ok=True)
        return handle


def unlink_name(queue: Any) -> None:
    """Of a queue through which an engine and a worker speak, once all readers of this node have mapped it. Where the
    writer is ended by a signal, Python's own keeper would do it, but only after the last process that it serves."""
    buffer = queue.buffer
    if buffer is not None and buffer.is_creator:
        buffer.shared_memory.unlink()
        buffer.is_creator = False  # else its end would do it again


@functools.cache
def install() -> None:
    """Has engines and workers that start in this process go without names."""
    wait_until_ready = shm_broadcast.MessageQueue.wait_until_ready

    def ready_without_name(queue: Any) -> None:
        wait_until_ready(queue)
        unlink_name(queue)

    cpu_communicator._CPUSHMDistributed = UnnamedMemory
    shm_broadcast.MessageQueue.wait_until_ready = ready_without_name
