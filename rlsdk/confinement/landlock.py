"""Landlock: which files, TCP ports and processes this process and all that it starts can still reach.

This module imports almost nothing, because processes that run programs of a model load it by path.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Sequence

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_PATH_RULE, _PORT_RULE = 1, 2
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
_READS = _EXECUTE | _READ_FILE | _READ_DIR
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
"""Rights to write files, and to create and remove entries of folders."""
_OF_FILES = _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE
"""Rights that a rule for a file, not a folder, may name."""
_BIND_TCP, _CONNECT_TCP = 1, 2
_SCOPES = 3
"""Abstract sockets, and signals."""
PORTS_SINCE, SIGNALS_SINCE = 4, 6
"""Version of Landlock -> TCP ports, signals to other processes."""


class _Beneath(ctypes.Structure):
    """`struct landlock_path_beneath_attr`."""

    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


class _Port(ctypes.Structure):
    """`struct landlock_net_port_attr`."""

    _fields_ = (("allowed", ctypes.c_uint64), ("port", ctypes.c_uint64))


def version() -> int:
    """Version of the kernel's Landlock; less than 1: it has none."""
    return _call(_CREATE, None, 0, 1)


def restrict(
    *,
    reads: Sequence[str] | None = None,
    writes: Sequence[str] | None = None,
    devices: Sequence[str] = (),
    ports: Sequence[int] | None = None,
) -> str | None:
    """Restricts this process, for good. Also blocks signals and abstract sockets to processes that are not restricted
    by the same call.

    Only what the kernel's version supports is blocked: TCP since version 4, signals since 6.

    Args:
        reads: files and folders that can still be read and executed; None: all.
        writes: folders that can still be changed (and read); None: all.
        devices: files that can still be read and written; missing ones are left out.
        ports: TCP ports that can still be connected to; none can be bound. None: all.

    Returns:
        Why Landlock cannot be used at all; None: it is in force.
    """
    has = version()
    if has < 1:
        return "the kernel has no Landlock"
    changes = _CHANGES | (_REFER if has >= 2 else 0) | (_TRUNCATE if has >= 3 else 0)
    files = (changes if writes is not None else 0) | (_READS if reads is not None else 0)
    wanted = [files]
    wanted += [0 if ports is None else _BIND_TCP | _CONNECT_TCP] if has >= PORTS_SINCE else []
    wanted += [_SCOPES] if has >= SIGNALS_SINCE else []
    if not any(wanted):
        return f"Landlock {has} is too old"
    attributes = (ctypes.c_uint64 * len(wanted))(*wanted)
    rules = _call(_CREATE, ctypes.byref(attributes), ctypes.sizeof(attributes), 0)
    if rules < 0:
        return _reason()
    try:
        for path in reads or ():
            _allow(rules, path, _READS & files)
        for path in writes or ():
            _allow(rules, path, files)
        for path in devices:
            _allow(rules, path, (_READ_FILE | _WRITE_FILE | _TRUNCATE) & files)
        for port in (ports or ()) if has >= PORTS_SINCE else ():
            _call(_ADD, rules, _PORT_RULE, ctypes.byref(_Port(_CONNECT_TCP, port)), 0)
        return None if _call(_RESTRICT, rules, 0) == 0 else _reason()
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    if not rights:
        return
    with contextlib.suppress(OSError):  # a missing file cannot be read or written
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            allowed = rights if stat.S_ISDIR(os.fstat(fd).st_mode) else rights & _OF_FILES
            _call(_ADD, rules, _PATH_RULE, ctypes.byref(_Beneath(allowed, fd)), 0)
        finally:
            os.close(fd)


def _call(number: int, *arguments: object) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    return int(library.syscall(ctypes.c_long(number), *arguments))


def _reason() -> str:
    return os.strerror(ctypes.get_errno())
