"""A program that makes many runs holds no more threads and open files than one that made a single run."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from test_loop import config_of, model, registry, run

from rlsdk.registry import Registry

__all__ = ["model", "registry"]


def held() -> dict[str, int]:
    """Open files by what they are, and threads."""
    gc.collect()
    found: dict[str, int] = {"threads": threading.active_count()}
    for name in os.listdir("/proc/self/fd"):
        try:
            kind = os.readlink(f"/proc/self/fd/{name}").partition(":")[0]
        except OSError:  # the one that lists the folder
            continue
        found[kind] = found.get(kind, 0) + 1
    return found


def grown(before: dict[str, int]) -> dict[str, int]:
    """What there is more of now."""
    return {kind: count - before.get(kind, 0) for kind, count in held().items() if count > before.get(kind, 0)}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
@pytest.mark.parametrize("extra", [(), ("--schedule.max_staleness", "1")], ids=["in step", "ahead"])
def test_runs_in_one_process_leave_no_thread_and_no_open_file(
    model: str, registry: Registry, tmp_path: Path, extra: tuple[str, ...]
) -> None:
    if extra:
        extra = (*extra, "--placement.preset", "disaggregated", "--placement.devices_per_node", "2")
    config = config_of(model, registry, 1, *extra)
    run(config, registry, tmp_path / "first")
    before = held()
    for at in range(2):
        run(config, registry, tmp_path / str(at))
    end = time.monotonic() + 30
    while (more := grown(before)) and time.monotonic() < end:  # threads of a pool end a moment later
        time.sleep(0.05)
    assert more == {}
