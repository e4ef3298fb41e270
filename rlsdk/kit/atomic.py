"""Atomic file writes: a file is complete or absent, and on disk when the call returns."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Gives a draft beside `path` to write to; on leaving it is brought to the disk and renamed into place.

    An exception removes the draft and leaves what stood at `path` as it was. Folders are made as needed.
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
    """Replaces the content of a file, or makes it; see `atomic_path`."""
    with atomic_path(path) as draft:
        draft.write_bytes(data)


def atomic_write_text(path: Path, text: str) -> None:
    """See `atomic_write_bytes`; UTF-8."""
    atomic_write_bytes(path, text.encode("utf-8"))


def atomic_write_json(path: Path, value: object) -> None:
    """See `atomic_write_bytes`; indented JSON."""
    atomic_write_text(path, json.dumps(value, indent=1) + "\n")


def atomic_write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes safetensors; see `atomic_path`. Tensors may live on any device and in any layout, but not share memory."""
    from safetensors.torch import save_file

    with atomic_path(path) as draft:
        save_file({name: t.detach().contiguous() for name, t in tensors.items()}, draft, metadata={"format": "pt"})


def _sync(path: Path) -> None:
    """Blocks until a file, or the list of names in a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
