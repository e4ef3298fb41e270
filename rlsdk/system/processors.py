"""How many processors this process may use."""

from __future__ import annotations

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_processors(quota: Path = _QUOTA) -> int:
    """Number of processors that its affinity and the quota of its control group leave to this process."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        share, period = quota.read_text().split()
        return min(usable, max(int(share) // int(period), 1))
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return usable
