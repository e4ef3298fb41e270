"""Atomic file writes: a file is complete or absent, and on disk when the call returns."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary path next to `path`; on exit that file is synced to disk and renamed to `path`.

    If the block raises, the temporary file is removed and `path` is unchanged. Missing folders are created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    draft = Path(name)
    try:
        yield draft
        draft.chmod(0o644)
        _sync(draft)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Replaces or creates a file; see `atomic_path`."""
    with atomic_path(path) as draft:
        draft.write_bytes(data)


def atomic_write_text(path: Path, text: str) -> None:
    """See `atomic_write_bytes`; UTF-8."""
    atomic_write_bytes(path, text.encode("utf-8"))


def atomic_write_json(path: Path, value: object) -> None:
    """See `atomic_write_bytes`; indented JSON."""
    atomic_write_text(path, json.dumps(value, indent=1) + "\n")


def as_os_error(error: Exception, path: Path) -> Exception:
    """The error of the system that a library reports as one of its own (`os error 28`); else the error itself."""
    number = re.search(r"os error (\d+)", str(error))
    return error if number is None else OSError(int(number[1]), os.strerror(int(number[1])), str(path))


def _sync(path: Path) -> None:
    """Syncs a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
