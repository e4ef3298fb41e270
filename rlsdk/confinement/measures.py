"""Measures that confine a process before it reads model output: network, file writes, privileges, resources.

Each measure is a separate system call (Linux: seccomp, Landlock, prctl, rlimits; elsewhere only rlimits). Measures that
the system does not support are reported in `Confinement.missing`, and the process continues. `docs/security-graders.md`
describes the limits. This module makes system calls directly, because neither Landlock nor seccomp has a maintained
Python package without a compiled library.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlsdk.confinement.landlock import restrict
from rlsdk.confinement.system_calls import filter_system_calls

MAX_FILE_BYTES = 64 << 20
"""Maximum size of a file that the process writes."""
MAX_OPEN_FILES = 1_024
MORE_PROCESSES = 1_024
"""Maximum number of additional processes and threads of the user; root has no such limit."""
NOBODY = 65_534
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/kfd",
           "/dev/nvidia*", "/dev/dri/*")  # fmt: skip
"""Device files that stay writable when file writes are off; `*` as in a shell."""


@dataclass
class Confinement:
    """Active measures, and those that this system does not support, each in a few words."""

    held: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def note(self, what: str, problem: str | None) -> None:
        """Adds one measure; `problem` is the reason why it failed, or None."""
        if problem is None:
            self.held.append(what)
        else:
            self.missing.append(f"{what} ({problem})")


def confine_before_imports(*, allow_network: bool) -> Confinement:
    """Confines this process, for good, before it imports the code of others.

    Blocks new privileges, the network and access to other processes, and sets resource limits.
    """
    confinement = Confinement()
    _limit_resources(confinement)
    if sys.platform != "linux":
        confinement.missing += [f"no network ({sys.platform} has no seccomp)", "no new privileges"]
        return confinement
    confinement.note("no new privileges", forbid_new_privileges())
    confinement.note("no access to this process from others", _prctl(_PR_SET_DUMPABLE, 0))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    denied = "no network and no tracing" if not allow_network else "no tracing"
    confinement.note(denied, filter_system_calls(network=allow_network))
    return confinement


def confine_after_imports(
    confinement: Confinement, scratch: str, files: Sequence[str] = (), *, allow_network: bool, allow_writes: bool
) -> None:
    """Confines this process after it imported the code of others, before that code reads its first input.

    Blocks file writes outside `scratch`, and changes root to another user.

    Args:
        confinement: of `confine_before_imports`; the further measures are added to it.
        scratch: the folder that stays writable.
        files: source files of the code, which the other user must be able to read.
        allow_network: as before.
        allow_writes: keep file writes, and the user.
    """
    if sys.platform == "linux":
        what = "no signals to others" if allow_writes else "no file writes outside its own folder"
        devices = [] if allow_writes else writable_devices()
        ports = None if allow_network else ()
        writes = None if allow_writes else [scratch]
        confinement.note(what, restrict(writes=writes, devices=devices, ports=ports))
    elif not allow_writes:
        confinement.missing.append(f"no file writes ({sys.platform} has no Landlock)")
    if sys.platform == "linux" and os.getuid() == 0:
        kept = "allow_writes: files are written as the user of the run"
        confinement.note("not root", kept if allow_writes else _become_nobody(scratch, files))
        if os.getuid() == 0 and not allow_writes:
            confinement.note("root without capabilities", keep_reading())
    elif os.getuid() == 0:
        confinement.missing.append("not root")


def probe() -> Confinement:
    """Tests in a forked child which measures work on this system."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            tested = confine_before_imports(allow_network=False)
            confine_after_imports(tested, "/nonexistent", allow_network=False, allow_writes=False)
            os.write(writable, "\n".join([*tested.held, "", *tested.missing]).encode())
        finally:
            os._exit(0)
    os.close(writable)
    with open(readable, encoding="utf-8") as stream:
        held, _, missing = stream.read().partition("\n\n")
    os.waitpid(child, 0)
    return Confinement(*([line for line in part.split("\n") if line] for part in (held, missing)))


def forbid_new_privileges() -> str | None:
    """Makes set-user-id programs ordinary ones. Returns why it cannot."""
    return _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def become(user: int) -> str | None:
    """Changes from root to another user and group, for good; keeps the right to read any file, which the interpreter
    may need. Returns why it cannot."""
    try:
        _prctl(_PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError as error:
        return str(error.strerror)
    return keep_reading()


def writable_devices() -> list[str]:
    """Device files of this machine that stay writable when file writes are off."""
    return [path for device in DEVICES for path in glob.glob(device)]


def limit_memory(memory_mb: int) -> None:
    """Limits the address space to current use plus `memory_mb` MiB. Only Linux reports current use."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        limit = used + (memory_mb << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 4, 8, 36, 38, 47
_AMBIENT_RAISE = 2
_CAP_DAC_READ_SEARCH = 2


def _limit_resources(confinement: Confinement) -> None:
    wanted = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
    ]
    for kind, value in wanted:
        limit_resource(kind, value)
    _limit_processes()
    confinement.held.append("limits on memory, open files, processes and the size of files")


def _limit_processes() -> None:
    """Limits the processes of this process's user; root has no such limit."""
    if os.getuid() != 0 and (running := tasks_of_user()) is not None:
        limit_resource(resource.RLIMIT_NPROC, running + MORE_PROCESSES)


def limit_resource(kind: int, value: int) -> None:
    """Lowers a limit, soft and hard."""
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (value, value))


def tasks_of_user() -> int | None:
    """Counts the processes and threads of this user, to which RLIMIT_NPROC applies."""
    total = 0
    try:
        for entry in os.scandir("/proc"):
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                    total += len(os.listdir(f"/proc/{entry.name}/task"))
    except OSError:
        return None
    return total


def _become_nobody(scratch: str, files: Sequence[str]) -> str | None:
    """Changes to the user nobody.

    If that user cannot read files that later imports need (an interpreter in root's own folder), the process keeps one
    capability of root: to read any file.
    """
    places = [sys.prefix, sys.base_prefix, *sys.path, *files]
    hidden = any(place and os.path.exists(place) and not _open_to_all(place) for place in places)
    try:
        with contextlib.suppress(OSError):
            os.chown(scratch, NOBODY, NOBODY)
        if hidden:
            _prctl(_PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError as error:
        return str(error.strerror)
    _limit_processes()
    return keep_reading() if hidden else None


def _open_to_all(place: str) -> bool:
    path = Path(place).resolve()
    readable = path.stat().st_mode & 0o004
    return bool(readable) and all(parent.stat().st_mode & 0o001 for parent in path.parents)


def keep_reading() -> str | None:
    """Drops all capabilities of root except the one to read any file, which later imports and programs may need.

    `no new privileges` prevents the process from regaining the others.
    """
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    read = 1 << _CAP_DAC_READ_SEARCH
    kept = (ctypes.c_uint32 * 6)(read, read, read, 0, 0, 0)  # effective, permitted, inheritable; then the upper halves
    library = ctypes.CDLL(None, use_errno=True)
    if library.capset(ctypes.byref(header), ctypes.byref(kept)) != 0:
        return _reason()
    # Programs that this process starts keep the capability too.
    library.prctl(_PR_CAP_AMBIENT, _AMBIENT_RAISE, _CAP_DAC_READ_SEARCH, 0, 0)
    return None


def _prctl(option: int, value: int, argument: Any = 0) -> str | None:
    library = ctypes.CDLL(None, use_errno=True)
    return None if library.prctl(option, value, argument, 0, 0) == 0 else _reason()


def _reason() -> str:
    return os.strerror(ctypes.get_errno())
