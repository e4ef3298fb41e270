"""Runs all checks, in the order in which problems should be fixed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rlsdk.diagnosis import machine, packages
from rlsdk.diagnosis.cluster import cluster
from rlsdk.diagnosis.finding import Finding, Health
from rlsdk.diagnosis.plugins import plugins
from rlsdk.system.printable import described


def no_word(check: str) -> None:
    """Says nothing of a check that begins."""


def examine(
    run_dir: Path, ray_address: str | None = None, begins: Callable[[str], None] = no_word
) -> Iterator[Finding]:
    """Yields each finding as soon as it is known. An exception of a check becomes a finding.

    Args:
        run_dir: folder of runs.
        ray_address: of a running cluster that is checked, too.
        begins: called with the name of each check before it: some import an engine, which takes seconds.
    """
    checks: list[tuple[str, Callable[[], Finding | Iterable[Finding]]]] = [
        ("interpreter", packages.interpreter),
        ("packages", packages.requirements),
        ("ray", packages.ray),
        ("torch", lambda: packages.torch(count_gpus())),
        ("rlsdk", packages.own),
        ("processors", machine.processors),
        ("memory", machine.memory),
        ("shared memory", machine.shared_memory),
        ("run folder", lambda: machine.run_folder(run_dir)),
        ("temporary files", machine.temporary_folder),
        ("open files", machine.open_files),
        ("ports", machine.ports),
    ]
    if ray_address is not None:
        checks.append(("cluster", lambda: cluster(ray_address)))
    checks.append(("plugins", lambda: plugins(device="cuda" if count_gpus() else "cpu")))
    for name, check in checks:
        begins(name)
        yield from guarded(name, check)


def guarded(name: str, check: Callable[[], Finding | Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of one check; an exception becomes a finding."""
    try:
        found = check()
        yield from (found,) if isinstance(found, Finding) else found
    except Exception as error:
        said = f"could not be checked: {described(error)}"
        yield Finding(check=name, state=Health.WARNING, found=said)


def count_gpus(folder: Path = Path("/dev"), visible: str | None = None) -> int:
    """NVIDIA GPUs that this process may use, without touching a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    found = len([entry for entry in folder.glob("nvidia*") if re.fullmatch(r"nvidia\d+", entry.name)])
    if visible is None or not found:
        return found
    return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])
