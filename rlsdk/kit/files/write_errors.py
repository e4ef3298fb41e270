"""What a run writes cannot be written (a full disk, a quota, a file system that became read-only): one error, one form.

Everything that a run must keep (journal, metrics, samples, checkpoints, settings) is written inside of `writing`, whose
error ends the run. What it can do without, such as the timeline of the pools, ignores an `OSError` where it is written.
`disk_errors` is around a whole run: it catches what a library writes.
"""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlsdk.interfaces import RlsdkError, WorkerError
from rlsdk.system.streams import STDERR, STDOUT

AGAIN = "then run the same command again: it resumes from the newest checkpoint"
"""What to do after the way out of a failed write."""


class OutputError(RlsdkError):
    """What a run must keep cannot be written. The step itself is done."""


@contextmanager
def writing(what: str, where: Path, again: str = AGAIN) -> Iterator[None]:
    """Turns an error of the system in the block into an `OutputError` that says what to do.

    Args:
        what: what is written, as the subject of a sentence in the plural.
        where: the file or folder that it is written into.
        again: what to do after the cause is gone.

    Raises:
        OutputError: the block raised an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{what} cannot be written into {str(where)!r}: {error}. {way_out(error, where)}, {again}"
        ) from error


DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""Errors of the system that a program cannot cause by itself."""


@contextmanager
def disk_errors(where: Path) -> Iterator[None]:
    """As `writing`, for a whole run in the folder `where`: only errors of the disk itself. What is printed may go to
    another one, and its errors say so already.

    Raises:
        OutputError: the block raised such an `OSError`, or a worker reports one.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK or error.filename in (STDOUT, STDERR) or isinstance(error, RlsdkError):
            raise
        place = where if error.filename is None else Path(os.fsdecode(error.filename))
        with writing("files of the run", place):
            raise
    except WorkerError as error:
        number = next((number for number in DISK if os.strerror(number) in str(error)), None)
        if number is None:
            raise
        raise OutputError(f"{error}. {way_out(OSError(number, ''), where)}, {AGAIN}") from error


def way_out(error: OSError, where: Path) -> str:
    """What to do about a failed write; begins with a capital letter, without a full stop."""
    folder = shlex.quote(str(next((part for part in (where, *where.parents) if part.is_dir()), Path())))
    match error.errno:
        case errno.ENOSPC:
            return f"Make room (`df -h {folder}`; `df -i {folder}` counts files)"
        case errno.EDQUOT:
            return f"Make room within this user's quota (`quota -s`, `du -sh {folder}`)"
        case errno.EFBIG:
            return "Raise the limit on the size of a file (`ulimit -f unlimited`)"
        case errno.EROFS:
            return f"Make the file system writable again (`findmnt -T {folder}`; the kernel's log says why it is not)"
        case errno.EIO:
            return f"The disk fails (`dmesg` says more): move {folder} to another one"
        case errno.EACCES | errno.EPERM:
            return f"Give this user the permission to write there (`ls -ld {folder}`, user {os.geteuid()})"
        case errno.EMFILE | errno.ENFILE:
            return "Raise the limit on open files (`ulimit -n 65536`)"
        case errno.ENOENT | errno.ESTALE | errno.ENOTCONN:
            return "Put the folder back, or mount its file system again"
    return f"Make {folder} writable"
