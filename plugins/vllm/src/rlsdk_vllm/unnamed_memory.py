"""Unlinks the names of vLLM's shared memory, so that the memory is freed when the last process that uses it ends, even
if that process is killed."""

from __future__ import annotations

import functools
import glob
from pathlib import Path
from typing import Any

from vllm.distributed.device_communicators import cpu_communicator, shm_broadcast

SHARED = Path("/dev/shm")


class UnnamedMemory(cpu_communicator._CPUSHMDistributed):  # type: ignore[misc]
    """Shared memory in which tensor-parallel workers reduce on a CPU. vLLM itself removes the names only when a worker
    ends normally: after a signal, 4 MB or more per worker would stay in /dev/shm."""

    def _init_cpu_shm(self) -> int:
        handle: int = super()._init_cpu_shm()
        # vLLM has waited until all workers mapped all blocks.
        for block in SHARED.glob(f"{glob.escape(self.group_name)}_*"):
            block.unlink(missing_ok=True)
        return handle


def unlink_name(queue: Any) -> None:
    """Unlinks the name of a queue between an engine and a worker, once all readers of this node have mapped it. If a
    signal ends the writer, Python's resource tracker unlinks it too, but only when the last process that uses the
    tracker has ended."""
    buffer = queue.buffer
    if buffer is not None and buffer.is_creator:
        buffer.shared_memory.unlink()
        buffer.is_creator = False  # otherwise the queue would unlink the name again when it is closed


@functools.cache
def install() -> None:
    """Patches vLLM so that engines and workers started in this process use unnamed memory."""
    wait_until_ready = shm_broadcast.MessageQueue.wait_until_ready

    def ready_without_name(queue: Any) -> None:
        wait_until_ready(queue)
        unlink_name(queue)

    cpu_communicator._CPUSHMDistributed = UnnamedMemory
    shm_broadcast.MessageQueue.wait_until_ready = ready_without_name
