"""Reads files that others may have made: regular ones only, and no more of them than can be true.

A pipe in a file's place would block the reader, a device has no end, and an edited file may be of any size.
"""

from __future__ import annotations

import errno
import json
import os
import select
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

TEXT_BYTES = 64 << 20
"""Largest file that is read as a whole, if the reader names no other limit: a configuration, a record, an index."""
LINE_BYTES = 64 << 20
"""Longest line of a file that is read line by line."""
PIPE_S = 30.0
"""Longest wait in seconds for the end of a pipe that the user named."""
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
}


class UnfitFileError(OSError):
    """A file that is not read, or a folder that is not removed, because of what it is: not of a regular kind, too
    large, or reached through a link. `strerror` says which, and `filename` names it."""

    def __init__(self, path: str | os.PathLike[str], why: str) -> None:
        super().__init__(errno.EINVAL, why, os.fspath(path))

    def __reduce__(self) -> tuple[type[UnfitFileError], tuple[object, object]]:
        return type(self), (self.filename, self.strerror)


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Opens a regular file for reading; never blocks, and does not touch a device.

    Raises:
        UnfitFileError: it is a pipe, a device or a socket.
        OSError: as `open` does, also for a folder.
    """
    _check_kind(path, os.stat(path).st_mode)
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_kind(path, os.fstat(handle).st_mode)  # it may have been replaced in between
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: str | os.PathLike[str], limit: int = TEXT_BYTES) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises:
        UnfitFileError: it is not a regular file, or larger.
        OSError: as `open` does.
    """
    with open_regular(path) as file:
        data = file.read(limit + 1)
        if len(data) > limit:
            raise UnfitFileError(path, f"has {os.fstat(file.fileno()).st_size:,} bytes, expected at most {limit:,}")
    return data


def is_pipe(path: str | os.PathLike[str]) -> bool:
    """Whether a path leads to a pipe; False if that cannot be found out."""
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def read_regular_or_pipe(path: str | os.PathLike[str], limit: int = TEXT_BYTES, timeout_s: float = PIPE_S) -> bytes:
    """As `read_regular`, but also reads a pipe to its end: for a path that the user typed, as `<(command)` in a shell.

    Raises:
        UnfitFileError: it is of another kind, or larger; or the pipe has no writer that ends in time, or gave nothing.
        OSError: as `open` does.
    """
    if not is_pipe(path):
        return read_regular(path, limit)
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        data = _read_to_end(handle, path, limit, timeout_s)
    finally:
        os.close(handle)
    if not data:
        raise UnfitFileError(path, "is a pipe that ended without any text; its command may have failed")
    return data


def _read_to_end(handle: int, path: str | os.PathLike[str], limit: int, timeout_s: float) -> bytes:
    poll, end, data = select.poll(), time.monotonic() + timeout_s, bytearray()
    poll.register(handle, select.POLLIN)
    while len(data) <= limit:
        left = end - time.monotonic()
        if left <= 0 or not poll.poll(1000 * left):
            raise UnfitFileError(path, f"is a pipe that nobody wrote to its end within {timeout_s:g} s")
        try:
            part = os.read(handle, 1 << 16)
        except BlockingIOError:  # another reader was faster
            continue
        if not part:
            return bytes(data)
        data += part
    raise UnfitFileError(path, f"is a pipe with more than {limit:,} bytes")


def read_regular_text(path: str | os.PathLike[str], limit: int = TEXT_BYTES, errors: str = "strict") -> str:
    """As `read_regular`, decoded from UTF-8, with line ends as Python's text files have them.

    Raises:
        UnicodeDecodeError: it is not UTF-8, and `errors` is strict.
    """
    return as_text(read_regular(path, limit), errors)


def as_text(content: bytes, errors: str = "strict") -> str:
    """The content of a text file, decoded from UTF-8, with line ends as Python's text files have them.

    Raises:
        UnicodeDecodeError: it is not UTF-8, and `errors` is strict.
    """
    return content.decode("utf-8", errors).replace("\r\n", "\n").replace("\r", "\n")


def regular_lines(
    path: str | os.PathLike[str], limit: int | None = None, line_limit: int = LINE_BYTES
) -> Iterator[bytes]:
    """Yields the lines of a regular file, with their ends.

    Args:
        path: of the file.
        limit: bytes that are read at most; None: all that it had when it was opened.
        line_limit: bytes of the longest line.

    Raises:
        UnfitFileError: it is not a regular file, a line is longer, or the file is.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise UnfitFileError(path, f"has {size:,} bytes, expected at most {limit:,}")
        number = 0
        while size > 0 and (line := file.readline(min(line_limit, size) + 1)):
            number += 1
            if len(line) > line_limit:
                raise UnfitFileError(path, f"line {number} has more than {line_limit:,} bytes")
            size -= len(line)
            yield line


def check_inside(root: Path, path: Path) -> None:
    """Refuses what is not really inside a folder; links that lead to the folder itself are fine.

    Raises:
        UnfitFileError: a symbolic link stands on the way from the folder to it, or the path leads out of the folder.
    """
    if not path.is_relative_to(root) or ".." in path.relative_to(root).parts:
        raise UnfitFileError(path, f"is not inside {str(root)!r}")
    place = root
    for part in path.relative_to(root).parts:
        place = place / part
        if place.is_symlink():
            raise UnfitFileError(place, f"is a symbolic link (to {os.readlink(place)!r}), which is not followed")


def foreign_reason(folder: Path, file: Path) -> str:
    """Why a file of a model's folder must not be copied from it; empty if it may be.

    It must be a regular file that really stands in the folder, or in the cache of the Hugging Face hub, whose folders
    consist of links to their own `blobs`.
    """
    try:
        mode = os.stat(file).st_mode
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not stat.S_ISREG(mode):
        return f"is {_KINDS.get(stat.S_IFMT(mode), 'no file')}, not a regular file"
    home, target = Path(os.path.realpath(folder)), Path(os.path.realpath(file))
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if target.is_relative_to(home) or target.is_relative_to(blobs):
        return ""
    return f"is a link out of its folder (to {str(target)!r})"


def remove_tree(root: Path, folder: Path) -> None:
    """Removes a folder that stands directly in `root`; does nothing if it is absent. Links in it are removed, not
    followed.

    Raises:
        UnfitFileError: it stands elsewhere, or is a link or a file.
    """
    if folder.name in ("", ".", "..") or os.path.realpath(folder.parent) != os.path.realpath(root):
        raise UnfitFileError(folder, f"is not in {str(root)!r}, so it is not removed")
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UnfitFileError(folder, "is a link or a file and not a folder, so it is not removed")
    shutil.rmtree(folder, ignore_errors=True)


def _check_kind(path: str | os.PathLike[str], mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise UnfitFileError(path, f"is {_KINDS.get(stat.S_IFMT(mode), 'no file')}, expected a regular file")


def read_json_lines(file: Path) -> list[Mapping[str, Any]]:
    """The objects in a file of JSON lines; other lines are left out. Empty if there is no such file."""
    found = []
    if file.exists():
        for text in read_regular_text(file, errors="replace").splitlines():
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, Mapping):
                found.append(line)
    return found
