"""Reads files that others may have made: regular ones only, and no more of them than can be true.

A pipe in a file's place would block the reader, a device has no end, and an edited file may be of any size.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

TEXT_BYTES = 64 << 20
"""Largest file that is read as a whole, if the reader names no other limit: a configuration, a record, an index."""
LINE_BYTES = 64 << 20
"""Longest line of a file that is read line by line."""
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


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
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
        found = file.read(limit + 1)
        if len(found) > limit:
            raise UnfitFileError(path, f"has {os.fstat(file.fileno()).st_size:,} bytes, expected at most {limit:,}")
    return found


def read_regular_text(path: str | os.PathLike[str], limit: int = TEXT_BYTES, errors: str = "strict") -> str:
    """As `read_regular`, decoded from UTF-8, with line ends as Python's text files have them.

    Raises:
        UnicodeDecodeError: it is not UTF-8, and `errors` is strict.
    """
    return read_regular(path, limit).decode("utf-8", errors).replace("\r\n", "\n").replace("\r", "\n")


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


def link_inside(root: Path, path: Path) -> Path | None:
    """The first symbolic link on the way from `root`, itself not looked at, to `path`, which is below it; None if there
    is none."""
    place = root
    for part in path.relative_to(root).parts:
        place = place / part
        if place.is_symlink():
            return place
    return None


def check_inside(root: Path, path: Path) -> None:
    """Refuses what is not really inside a folder.

    Raises:
        UnfitFileError: a link stands on the way to it, or the path leads out of the folder.
    """
    if ".." in path.parts or not path.is_relative_to(root):
        raise UnfitFileError(path, f"is not inside {str(root)!r}")
    if (link := link_inside(root, path)) is not None:
        raise UnfitFileError(link, f"is a symbolic link (to {os.readlink(link)!r}), which is not followed out of a run")


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
