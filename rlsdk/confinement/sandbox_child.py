"""Runs a program that a model wrote: confines its own process, runs the program, and writes the result.

`rlsdk.confinement.sandbox` starts this script as `python -I -S sandbox_child.py JOB RESULT`; the arguments are file
descriptors. It imports nothing from rlsdk, so it starts in a few milliseconds, and the program finds no data of the
run in its process.
"""

import _sitebuiltins
import builtins
import ctypes
import errno
import importlib.util
import json
import os
import resource
import signal
import sys
import types

_NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""CLONE_NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
_MS_REC, _MS_PRIVATE, _MS_NOSUID, _MS_NODEV = 0x4000, 1 << 18, 2, 4
_SYS_MOUNT_SETATTR, _AT_RECURSIVE, _AT_FDCWD, _MOUNT_ATTR_RDONLY = 442, 0x8000, -100, 1
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CAPABILITY_VERSION = 0x20080522
INNER_ID = 1000
CANNOT_CONFINE = 97
"""Exit status if the system does not allow the process to confine itself."""

_TAKEN_FOR_GRANTED = """
import bisect, collections, copy, datetime, fractions, functools, heapq, itertools, math, random, re, string, sys, time
from typing import *
from bisect import *
from collections import *
from copy import copy, deepcopy
from fractions import Fraction
from functools import *
from heapq import *
from itertools import *
from math import ceil, comb, cos, exp, fabs, factorial, floor, gcd, hypot, inf, isqrt, lcm, log, log2, log10, pi, sin
from math import sqrt, tan
"""
"""Imports that graders of call-based problems (APPS, TACO) give to programs, as far as they hide no built-in name."""


def main() -> None:
    if sys.platform == "linux":  # ends with the grading process, even if that is killed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    job_fd, result_fd = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(job_fd, encoding="utf-8") as stream:
        job = json.load(stream)
    if job["confined"]:
        try:
            confine(job["folder"])
        except (OSError, AttributeError) as error:  # other systems lack these calls
            os.write(result_fd, json.dumps({"refused": str(error)}).encode())
            os._exit(CANNOT_CONFINE)
    limit(job["seconds"], job["memory_mb"])
    add_site_builtins()
    sys.argv = ["program.py"]
    if job["mode"] == "io":
        os.close(result_fd)
        exec(compile(job["program"], "<program>", "exec"), {"__name__": "__main__"})
        return
    run_tests(job, result_fd)


def confine(folder: str) -> None:
    """Removes the network, all writable folders except new empty ones, and all capabilities from this process.

    It uses namespaces where the system allows them. The process continues as the first process of its own PID
    namespace: it sees no other process, and all processes that it starts end with it. Every file except the program's
    own is read-only.

    A grading process that is itself confined may not mount. Then the rules of the grading process (seccomp, Landlock)
    are applied once more, with `folder` as the only writable one. Landlock does not cover permissions, owners and times
    of files, so seccomp blocks changes of these.

    Sockets are blocked in both cases: a socket file may be in any folder, and the folders of the interpreter cannot be
    hidden.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    # In a new user namespace, a process loses the capability to read the interpreter's files (`measures.py`).
    reads_by_right = uid != 0 and has_rights()
    unshared = not reads_by_right and libc.unshare(_NEW_NAMESPACES) == 0
    try:
        _check(0 if unshared else -1, "unshare")
        map_user(uid, gid)
        hide_files(libc, dict.fromkeys([*hidden(), folder], 64))
        with open(os.devnull, "wb") as stream:  # the inherited one is on a writable mount
            os.dup2(stream.fileno(), 2)
        attributes = True
    except OSError as error:
        apply_rules(folder, error)
        attributes = False
    os.chdir(folder)
    _check(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")  # the change of capabilities cleared it
    child = os.fork() if unshared else 0
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    _check(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    problem = load_rules("system_calls").filter_system_calls(network=False, attributes=attributes)
    if problem is not None:
        raise OSError(errno.ENOSYS, f"seccomp: {problem}")
    if not reads_by_right:
        drop_rights(libc)


def drop_rights(libc: ctypes.CDLL) -> None:
    """Drops all capabilities of this process."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    _check(libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")


def has_rights() -> bool:
    """Whether this process has any capability."""
    with open("/proc/self/status") as stream:
        return any(line.startswith("CapEff:") and int(line.split()[1], 16) for line in stream)


def map_user(uid: int, gid: int) -> None:
    """In a new user namespace: makes this process, of this user outside, its only one."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{INNER_ID} {uid} 1"), ("gid_map", f"{INNER_ID} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as stream:
            stream.write(text)


def hide_files(libc: ctypes.CDLL, folders: dict[str, int]) -> None:
    """In new namespaces: makes all files read-only, and mounts empty folders, of so many MiB each, over `folders`."""
    _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount private")
    read_only = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    size = ctypes.sizeof(read_only)
    called = libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, ctypes.byref(read_only), size)
    _check(called, "mount_setattr")
    for path, size_mb in folders.items():
        options = f"size={size_mb}m,mode=700,uid={INNER_ID},gid={INNER_ID}".encode()
        os.makedirs(path, exist_ok=True)
        _check(libc.mount(b"none", path.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options), f"mount tmpfs {path}")


def apply_rules(folder: str, why: OSError) -> None:
    """Applies seccomp and Landlock as for grading processes (`measures.py`, loaded by path).

    Raises OSError if these cannot block network and file writes either.
    """
    try:
        for needed in ("landlock", "system_calls"):  # `measures` imports them
            load_rules(needed)
        rules = load_rules("measures")
    except FileNotFoundError:
        raise why from None
    confinement = rules.confine_before_imports(allow_network=False)
    rules.confine_after_imports(confinement, folder, allow_network=False, allow_writes=False)
    if not all(any(what in held for held in confinement.held) for what in ("no network", "no file writes")):
        raise OSError(why.errno, f"{why}; missing: {', '.join(confinement.missing)}")


def load_rules(name: str) -> types.ModuleType:
    """Loads a module from the folder of this one under its full name; the package need not be importable here."""
    full = f"rlsdk.confinement.{name}"
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    specification = importlib.util.spec_from_file_location(full, path)
    assert specification is not None
    assert specification.loader is not None
    module = sys.modules[full] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def hidden(more: tuple[str, ...] = (), needed: tuple[str, ...] = ()) -> list[str]:
    """Returns folders with sockets, shared memory and temporary files of other processes, and `more`, except ones in
    use here or with files that are `needed`."""
    used = [os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, __file__, *sys.path, *needed)]
    folders = {os.path.realpath(path) for path in ("/proc", "/run", "/tmp", "/var/tmp", "/dev/shm", *more)}
    folders -= {path for path in folders for name in used if f"{name}/".startswith(f"{path}/")}
    return sorted(path for path in folders if os.path.isdir(path))


def limit(seconds: float, memory_mb: int) -> None:
    """Limits CPU time, memory, file size and open files, and disables core dumps."""
    cpu = max(1, int(seconds) + 1)
    for what, bound in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_FSIZE, 4 << 20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        allowed = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(what, (allowed, allowed))


def run_tests(job: dict, result_fd: int) -> None:  # type: ignore[type-arg]
    """Loads the program, then evaluates each expression and runs each test. Writes one line of JSON for each."""
    names: dict[str, object] = {"__name__": "program"}
    if any(kind == "call" for kind, _ in job["tests"]):
        exec(_TAKEN_FOR_GRANTED, names)
    if job["setup"]:
        exec(compile(job["setup"], "<setup>", "exec"), names)
    exec(compile(job["program"], "<program>", "exec"), names)
    for at, (kind, source) in enumerate(job["tests"]):
        line: dict[str, object] = {"at": at}
        try:
            if kind == "value":
                line["value"] = as_data(eval(compile(source, "<test>", "eval"), names))
            elif kind == "call":
                line["value"] = as_data(call(json.loads(source), names))
            else:
                exec(compile(source, "<test>", "exec"), dict(names))
                line["nonce"] = job["nonce"]
        except BaseException as error:
            line["error"] = type(error).__name__
        os.write(result_fd, json.dumps(line).encode() + b"\n")


def call(job: dict, names: dict[str, object]) -> object:  # type: ignore[type-arg]
    """Calls a function of the program, or the method of its class `Solution` that has this name."""
    name, solution = job["function"], names.get("Solution")
    owned = isinstance(solution, type) and hasattr(solution, name)
    function = getattr(solution(), name) if owned else names[name]  # type: ignore[operator]
    return function(*map(with_int_keys, job["arguments"]))  # type: ignore[operator]


def with_int_keys(value: object) -> object:
    """An argument whose keys are integers again, where JSON has made text of all of them."""
    if not isinstance(value, dict) or not all(key.removeprefix("-").isdecimal() and key.isascii() for key in value):
        return value
    return {int(key): item for key, item in value.items()}


def add_site_builtins() -> None:
    """Adds the names that an interpreter has only with its module `site`: `exit`, `quit` and the like."""
    if hasattr(builtins, "exit"):
        return
    made: dict[str, object] = {name: _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)") for name in ("exit", "quit")}
    made["help"] = _sitebuiltins._Helper()
    for name in ("copyright", "credits", "license"):
        made[name] = _sitebuiltins._Printer(name, sys.copyright)
    for name, value in made.items():
        setattr(builtins, name, value)


def as_data(value: object, depth: int = 0) -> object:
    """Encodes a plain value as JSON that keeps its type: list, tuple and set stay distinct.

    Raises TypeError for other types.
    """
    if depth > 50:
        raise TypeError("nested too deeply")
    if value is None or isinstance(value, bool | str):
        return {"value": value if value is None or isinstance(value, bool) else str(value)}
    if isinstance(value, int):
        return {"int": format(int(value), "x")}
    if isinstance(value, float):
        return {"float": float(value).hex()}
    if isinstance(value, dict):
        return {"dict": [[as_data(key, depth + 1), as_data(inner, depth + 1)] for key, inner in value.items()]}
    for kind, name in ((list, "list"), (tuple, "tuple"), (set, "set"), (frozenset, "set")):
        if isinstance(value, kind):
            return {name: [as_data(inner, depth + 1) for inner in value]}
    if hasattr(value, "tolist"):
        return as_data(value.tolist(), depth + 1)
    raise TypeError(f"a {type(value).__name__} is not a plain value")


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
