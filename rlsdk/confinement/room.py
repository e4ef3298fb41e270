"""A sandbox's files and network, and the rules that each process in it takes upon itself before it runs any program.

`keeper.py` loads this by path. It needs no namespaces: where the system refuses them, the rules alone confine.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

from rlsdk.confinement import landlock, measures, sandbox_child
from rlsdk.confinement.system_calls import filter_system_calls

NEWPID = 0x20000000
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x40000000
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/localtime")
"""What interpreters and the system's commands read."""
_NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/gai.conf", "/etc/services", "/etc/ssl",
            "/etc/protocols", "/etc/ca-certificates", "/etc/pki")  # fmt: skip
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_HOMES = ("/mnt", "/srv", "/media")
"""Where the sandbox's folder is mounted: programs see the same path in every episode."""
_SHARED_MEMORY, _SHARED_MEMORY_MB = "/dev/shm", 16
_RESERVE = 8
"""Processes of the keeper, in the count of processes of the sandbox's user."""


class Room:
    """Made once a sandbox, in its keeper."""

    def __init__(self, job: dict[str, Any]) -> None:
        """Enters namespaces where the system allows it.

        Args:
            job: as `rlsdk.agents` sends it: folder, user_home, read, ports, memory_mb, files_mb, processes, namespaces.
        """
        self.job, self.home = job, str(job["folder"])
        self.writes = [self.home]
        self._is_root = os.getuid() == 0
        why = _problem_of(self._unshare) if job["namespaces"] else "switched off"
        self.is_unshared = why is None
        if self.is_unshared:
            self._unshare()
        if self._is_root and not self.is_unshared:
            os.chown(self.home, measures.NOBODY, measures.NOBODY)
        self.missing = [] if self.is_unshared else [f"namespaces: no chmod, and processes of others are seen ({why})"]
        prefixes = [sys.prefix, sys.base_prefix, sys.exec_prefix]
        listed = [*_SYSTEM, *prefixes, *job["read"], *(_NETWORK if job["ports"] else ())]
        self.reads = [path for path in listed if os.path.realpath(path) != "/"]

    def confine(self) -> measures.Confinement:
        """Confines this process, for good; returns what holds and what this system cannot do."""
        found = measures.Confinement(missing=[*self.missing])
        found.note("no new privileges", measures.forbid_new_privileges())
        if self._is_root:  # whose processes have no limit, and who owns what matters
            found.note("not root", measures.become(sandbox_child.INNER_ID if self.is_unshared else measures.NOBODY))
        self._limit(found)
        problem = landlock.restrict(
            reads=self.reads, writes=self.writes, devices=_DEVICES, ports=tuple(self.job["ports"])
        )
        found.note("reads of listed files only", problem)
        found.note("writes to its own folder only", problem)
        has, ports = landlock.version(), bool(self.job["ports"])
        if ports:
            found.note("network by listed TCP ports only", None if has >= landlock.PORTS_SINCE else f"Landlock {has}")
        if not self.is_unshared:
            found.note("no signals to others", None if has >= landlock.SIGNALS_SINCE else f"Landlock {has}")
        denied = "no tracing" if ports else "no network"
        found.note(denied, filter_system_calls(network=ports, attributes=self.is_unshared))
        if not self._is_root and self.is_unshared:
            sandbox_child.drop_rights(ctypes.CDLL(None, use_errno=True))
        return found

    def _limit(self, found: measures.Confinement) -> None:
        job = self.job
        measures.limit_resource(resource.RLIMIT_AS, job["memory_mb"] << 20)
        measures.limit_resource(resource.RLIMIT_FSIZE, job["files_mb"] << 20)
        measures.limit_resource(resource.RLIMIT_NOFILE, 256)
        measures.limit_resource(resource.RLIMIT_CORE, 0)
        others = _RESERVE if self.is_unshared else measures.tasks_of_user() or 0
        measures.limit_resource(resource.RLIMIT_NPROC, others + job["processes"])
        found.held.append("limits on memory, processes, files and time")

    def _unshare(self) -> None:
        """Enters new namespaces, where all files are read-only, and empty folders stand over those of other processes.

        Raises OSError where the system does not allow it.
        """
        if not self._is_root and sandbox_child.has_rights():
            raise OSError(errno.EPERM, "files are read by a right that would be lost")
        libc, uid, gid = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
        flags = _NEWNS | _NEWUTS | _NEWIPC | _NEWUSER | (0 if self.job["ports"] else _NEWNET)
        map_users = _users_of_root() if self._is_root else lambda: sandbox_child.map_user(uid, gid)
        if libc.unshare(flags) < 0:
            raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
        map_users()
        users = ("/home", "/root", os.path.realpath(self.job["user_home"]))
        hidden = [path for path in sandbox_child.hidden(users, tuple(self.job["read"])) if path != "/"]
        home = next((path for path in _HOMES if self._is_free(path)), self.home)
        files_mb = self.job["files_mb"]
        sizes = dict.fromkeys(hidden, 1)
        sizes |= {"/tmp": files_mb} if "/tmp" in hidden else {}
        sizes |= {_SHARED_MEMORY: _SHARED_MEMORY_MB} if _SHARED_MEMORY in hidden else {}
        sandbox_child.hide_files(libc, {**sizes, home: files_mb})
        self.home, self.writes = home, [home, *(path for path in ("/tmp", _SHARED_MEMORY) if path in hidden)]

    def _is_free(self, path: str) -> bool:
        """Whether a folder is there, and nothing in it is needed."""
        used = (sys.prefix, sys.base_prefix, __file__, *sys.path, *self.job["read"])
        return os.path.isdir(path) and not any(f"{os.path.realpath(one)}/".startswith(f"{path}/") for one in used)


def _users_of_root() -> Callable[[], None]:
    """For a process of root that is about to enter a user namespace: what gives it two users there, root, and one that
    is nobody outside. Only a process that stayed outside may do so."""
    readable, writable = os.pipe()
    pid, helper = os.getpid(), os.fork()
    if not helper:
        try:
            os.close(writable)
            os.read(readable, 1)
            for name in ("uid_map", "gid_map"):
                with open(f"/proc/{pid}/{name}", "w") as stream:
                    stream.write(f"0 0 1\n{sandbox_child.INNER_ID} {measures.NOBODY} 1\n")
            os._exit(0)
        finally:
            os._exit(1)
    os.close(readable)

    def map_users() -> None:
        os.close(writable)
        _, status = os.waitpid(helper, 0)
        if status:
            raise OSError(errno.EPERM, "users of the namespace could not be mapped")

    return map_users


def _problem_of(attempt: Callable[[], None]) -> str | None:
    """Tries something in a child of its own, which a failure may leave half-way; returns why it failed."""
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        try:
            attempt()
        except OSError as error:
            os.write(writable, f"{error.strerror or error}".encode())
        except BaseException as error:
            os.write(writable, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable, encoding="utf-8") as stream:
        said = stream.read()
    os.waitpid(child, 0)
    return said or None
