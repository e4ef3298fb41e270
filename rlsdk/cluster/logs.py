"""The last lines that a worker printed, from whichever node it ran on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rlsdk.cluster.messages import WorkerInfo

_TAIL_BYTES = 16 << 10
_REMOTE_TIMEOUT_S = 10.0


def last_lines(info: WorkerInfo, count: int = 20) -> str:
    """The end of a worker's log, indented; says so where it cannot be read."""
    import ray

    try:
        if info.node_id == ray.get_runtime_context().get_node_id():
            lines = read_tail(info.logs, count)
        else:
            lines = _read_on_node(info, count)
    except Exception as error:  # the worker's death is the news; a log that cannot be had must not hide it
        return f"  (log cannot be read: {type(error).__name__}: {error})"
    return "\n".join(f"  {line}" for line in lines) or "  (it printed nothing)"


def read_tail(paths: Sequence[str], count: int) -> list[str]:
    """The last non-empty lines of each file."""
    lines = []
    for path in paths:
        with Path(path).open("rb") as handle:
            handle.seek(max(0, os.fstat(handle.fileno()).st_size - _TAIL_BYTES))
            text = handle.read().decode(errors="replace")
        lines += [line for line in text.splitlines() if line.strip()][-count:]
    return lines


def _read_on_node(info: WorkerInfo, count: int) -> list[str]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node_id=info.node_id, soft=False)
    task = ray.remote(read_tail).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    lines: list[str] = ray.get(task.remote(info.logs, count), timeout=_REMOTE_TIMEOUT_S)
    return lines
