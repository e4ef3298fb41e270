"""Blocks system calls with seccomp.

Processes that read model output may not open sockets, trace other processes, or load kernel modules. Programs written
by a model may also not change the metadata of files (permissions, owners, times, attributes).

This module imports almost nothing, because `sandbox_child` loads it by path into every process that runs a program.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Mapping

_PR_SET_SECCOMP = 22
_SYSTEM_CALLS: Mapping[str, tuple[int, Mapping[str, int]]] = {
    "x86_64": (0xC000003E, {
        "socket": 41, "io_uring_setup": 425, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311,
        "pidfd_getfd": 438, "bpf": 321, "keyctl": 250, "add_key": 248, "request_key": 249, "perf_event_open": 298,
        "userfaultfd": 323, "kexec_load": 246, "init_module": 175, "finit_module": 313, "reboot": 169,
        "open_by_handle_at": 304,
    }),
    "aarch64": (0xC00000B7, {
        "socket": 198, "io_uring_setup": 425, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271,
        "pidfd_getfd": 438, "bpf": 280, "keyctl": 219, "add_key": 217, "request_key": 218, "perf_event_open": 241,
        "userfaultfd": 282, "kexec_load": 104, "init_module": 105, "finit_module": 273, "reboot": 142,
        "open_by_handle_at": 265,
    }),
}  # fmt: skip
"""Machine -> its number in audit.h, and the blocked system calls."""
_ATTRIBUTES: Mapping[str, Mapping[str, int]] = {
    "x86_64": {
        "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "utime": 132, "setxattr": 188,
        "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199,
        "utimes": 235, "fchownat": 260, "futimesat": 261, "fchmodat": 268, "utimensat": 280, "fchmodat2": 452,
        "setxattrat": 463, "removexattrat": 466, "file_setattr": 469,
    },
    "aarch64": {
        "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16,
        "fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55, "utimensat": 88, "fchmodat2": 452,
        "setxattrat": 463, "removexattrat": 466, "file_setattr": 469,
    },
}  # fmt: skip
"""Machine -> system calls that change permissions, owners, times and attributes of files; Landlock covers none."""
_X32_BIT = 0x40000000
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EACCES


class _Instruction(ctypes.Structure):
    """`struct sock_filter`."""

    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


def filter_system_calls(*, network: bool, attributes: bool = True) -> str | None:
    """Makes system calls fail with EACCES, in this process and in all processes that it starts.

    Needs `no new privileges`, or the rights of root.

    Args:
        network: allow sockets.
        attributes: allow changes of permissions, owners, times and attributes of files.

    Returns:
        Why the filter could not be installed; None if it is active.
    """
    known = _SYSTEM_CALLS.get(os.uname().machine)
    if known is None:
        return f"unknown machine {os.uname().machine}"
    audit, calls = known
    allowed = {"socket"} if network else set()
    allowed |= {"io_uring_setup"} if network and attributes else set()  # it makes sockets and sets attributes
    numbers = [number for name, number in calls.items() if name not in allowed]
    numbers += [] if attributes else _ATTRIBUTES[os.uname().machine].values()
    body = [(_JUMP_EQUAL, number) for number in numbers]
    # System calls with the numbers of another architecture (32 bits) or of x32 are all refused.
    program = [(_LOAD, 0, 0, 4), (_JUMP_EQUAL, 0, len(body) + 3, audit), (_LOAD, 0, 0, 0)]
    program.append((_JUMP_AT_LEAST, len(body) + 1, 0, _X32_BIT))
    program += [(code, len(body) - at, 0, number) for at, (code, number) in enumerate(body)]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    filled = (_Instruction * len(program))(*(_Instruction(*line) for line in program))
    library = ctypes.CDLL(None, use_errno=True)
    refused = library.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(_Program(len(program), filled)), 0, 0)
    return os.strerror(ctypes.get_errno()) if refused else None
