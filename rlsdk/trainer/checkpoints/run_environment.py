"""The environment of a run, for its report: command, machine and versions."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path

import psutil

PACKAGES = ("rlsdk", "torch", "transformers", "ray")
GPUS = Path("/proc/driver/nvidia/gpus")
"""Has one folder per GPU; reading it uses no device."""


def surroundings() -> dict[str, str]:
    """`command`, `machine` and `versions`, each as one line of text."""
    return {"command": _command(), "machine": _machine(), "versions": _versions()}


def _command() -> str:
    """The command as typed, with only the name of the program."""
    program, *arguments = sys.argv or [""]
    name = Path(program).name or "python"
    return shlex.join(["rlsdk" if name == "__main__.py" else name, *arguments])  # `python -m rlsdk`


def _machine() -> str:
    parts = [f"{platform.system()} {platform.machine()}"]
    parts.append(f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} CPU cores")
    parts.append(f"{psutil.virtual_memory().total / 2**30:.0f} GiB memory")
    gpus = _gpus()
    parts += [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)] or ["no GPU"]
    return ", ".join(parts)


def _gpus() -> list[str]:
    """Names of this node's GPUs."""
    gpus = []
    for file in sorted(GPUS.glob("*/information")):
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue
        gpus += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return gpus


def _versions() -> str:
    known = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            known.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(known)
