"""Shared memory of vLLM's workers on a CPU: without a name, so that it ends with those that use it."""

from __future__ import annotations

import glob
from pathlib import Path

from vllm.distributed.device_communicators import cpu_communicator

SHARED = Path("/dev/shm")


class NamelessMemory(cpu_communicator._CPUSHMDistributed):  # type: ignore[misc]
    """Through which workers of tensor parallelism add up. vLLM itself takes its names away when a worker comes to its
    end, which one that is ended by a signal never does: 4 MB a worker, or more, would stay in /dev/shm."""

    def _init_cpu_shm(self) -> int:
        handle: int = super()._init_cpu_shm()
        # All workers have mapped all blocks: vLLM waits for that.
        for block in SHARED.glob(f"{glob.escape(self.group_name)}_*"):
            block.unlink(missing_ok=True)
        return handle


def install() -> None:
    """Has workers that start in this process use it."""
    cpu_communicator._CPUSHMDistributed = NamelessMemory
