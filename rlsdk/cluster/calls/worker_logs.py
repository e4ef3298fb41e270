"""The last lines that a worker printed, from whichever node it ran on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rlsdk.cluster.devices.worker_info import WorkerInfo
from rlsdk.cluster.ray_cluster.nodes import run_on_node

_TAIL_BYTES = 16 << 10
_REMOTE_TIMEOUT_S = 30.0


def last_lines(info: WorkerInfo, count: int = 20) -> str:
    """The end of a worker's log, indented, or a note that it cannot be read."""
    try:
        lines = run_on_node(info.node_id, read_tail, info.logs, count, timeout_s=_REMOTE_TIMEOUT_S)
    except Exception as error:  # an unreadable log must not hide the worker's death
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
