"""A folder per worker for temporary files, gone when the worker closes, or at the latest when another one starts."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

_PREFIX = "rlsdk-scratch-"


def make_scratch_dir(parent: str | None = None) -> str:
    """Makes this process's folder, and removes those of processes that were killed before they could.

    Args:
        parent: where; None: the folder that Ray keeps its own files in on this node.
    """
    place = Path(parent or _ray_folder())
    for folder in place.glob(f"{_PREFIX}*"):
        with suppress(OSError, ValueError):
            owner = int(folder.name.removeprefix(_PREFIX).split("-")[0])
            if folder.stat().st_uid == os.getuid() and not psutil.pid_exists(owner):
                shutil.rmtree(folder, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=place)


def _ray_folder() -> str:
    import ray

    try:
        return str(ray.get_runtime_context().get_temp_dir())
    except AttributeError:  # an older Ray
        return tempfile.gettempdir()
