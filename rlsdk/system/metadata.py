"""Metadata of installed distributions that cannot be read: it costs that distribution, and nothing else.

`importlib.metadata` raises when one `entry_points.txt` anywhere on `sys.path` is not UTF-8, has a line that is no entry
point, or is a pipe (which blocks). pydantic, torch, fsspec and transformers look through all distributions when they
are imported, so a single damaged one would keep every command and every worker from starting.
"""

from __future__ import annotations

import importlib.metadata
import os
import stat
from pathlib import Path
from typing import Any

MAX_BYTES = 64 << 20
"""Largest file of metadata that is read: the list of files of a large distribution has a tenth of it."""
ENTRY_POINTS = "entry_points.txt"


def tolerate_damaged_metadata() -> None:
    """From now on, `importlib.metadata` treats what it cannot read as absent in this process; nothing changes for
    metadata that it can read. May be called again."""
    if getattr(importlib.metadata, "_rlsdk_tolerant", False):
        return
    setattr(importlib.metadata, "_rlsdk_tolerant", True)  # noqa: B010 - no attribute of the module's type
    importlib.metadata.PathDistribution.read_text = _tolerant_text(  # type: ignore[method-assign]
        importlib.metadata.PathDistribution.read_text
    )
    for name, absent in (("entry_points", importlib.metadata.EntryPoints), ("files", lambda: None)):
        original = getattr(importlib.metadata.Distribution, name)
        setattr(importlib.metadata.Distribution, name, property(_tolerant(original.fget, absent), doc=original.__doc__))


def metadata_problem(distribution: importlib.metadata.Distribution) -> str:
    """What keeps the entry points of a distribution from being read; empty if nothing does."""
    file = _file(distribution, ENTRY_POINTS)
    if file is None:
        return ""
    if unfit := _unfit(file):
        return f"{file} {unfit}"
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        return f"{file} cannot be read ({type(error).__name__}: {error})"
    try:
        list(importlib.metadata.EntryPoints._from_text(text))  # type: ignore[attr-defined]  # what the property calls
    except Exception:
        return f"{file} has a line that is no entry point: expected `name = module` or `name = module:object`"
    return ""


def _tolerant_text(read: Any) -> Any:
    def read_text(self: importlib.metadata.PathDistribution, filename: str) -> str | None:
        file = _file(self, filename)
        if file is not None and _unfit(file):
            return None
        try:
            text: str | None = read(self, filename)
        except UnicodeDecodeError:
            return None if file is None or filename == ENTRY_POINTS else file.read_bytes().decode("utf-8", "replace")
        return text

    return read_text


def _tolerant(read: Any, absent: Any) -> Any:
    def value(self: importlib.metadata.Distribution) -> Any:
        try:
            return read(self)
        except Exception:
            return absent()

    return value


def _file(distribution: importlib.metadata.Distribution, name: str) -> Path | None:
    """Path of a file of metadata; None if the distribution does not stand in a folder."""
    folder = getattr(distribution, "_path", None)
    return folder / name if isinstance(folder, Path) else None


def _unfit(file: Path) -> str:
    """Reason why a file is not read: opening it would block, or reading it would not end; empty if it may be read."""
    try:
        status = os.stat(file)
    except OSError:
        return ""
    if stat.S_ISDIR(status.st_mode):
        return ""
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    return f"has {status.st_size:,} bytes" if status.st_size > MAX_BYTES else ""
