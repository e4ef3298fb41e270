"""Checkpoints that are whole or absent: written beside, sealed by a manifest, and renamed into place."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlsdk.interfaces import CheckpointError

MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d{8})")


class CheckpointStore:
    """The folder `checkpoints/` of a run: `step_00000010/` and so on, each sealed by a manifest of its files.

    A writer that dies leaves a folder whose name starts with a dot; it is never read, and the next writer removes it.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    @contextmanager
    def write(self, step: int, state: Mapping[str, Any]) -> Iterator[Path]:
        """Yields an empty folder to fill; on a clean exit it becomes the checkpoint of `step`.

        Raises:
            CheckpointError: the disk refused; whatever was whole before still is.
        """
        final = self.folder / f"step_{step:08d}"
        draft = self.folder / f".{final.name}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            draft.mkdir()
            yield draft
            _seal(draft, step, state)
            if final.exists():
                os.replace(final, self.folder / f".{final.name}.old")
            os.replace(draft, final)
            _fsync_folder(self.folder)
        except OSError as error:
            raise CheckpointError(f"cannot write checkpoint {final}: {error}; earlier ones are untouched") from error
        self._sweep()
        for _, old in self.whole()[: -self.keep or None]:
            # Renamed first: a kill in the middle of the removal must not leave a folder that looks whole.
            doomed = self.folder / f".{old.name}.old"
            os.replace(old, doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def whole(self) -> list[tuple[int, Path]]:
        """Step and folder of every whole checkpoint, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [(int(match[1]), path) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return sorted((step, path) for step, path in found if not faults(path))

    def newest(self) -> Path | None:
        return next((path for _, path in reversed(self.whole())), None)

    def _sweep(self) -> None:
        for leftover in self.folder.glob(".step_*"):
            shutil.rmtree(leftover, ignore_errors=True)


def read_state(path: Path) -> dict[str, Any]:
    """What was given to `CheckpointStore.write` with this checkpoint.

    Raises:
        CheckpointError: the folder is not a whole checkpoint; says what is wrong with it.
    """
    if problems := faults(path):
        raise CheckpointError(f"{path} is not a whole checkpoint: {'; '.join(problems[:3])}")
    state: dict[str, Any] = json.loads((path / MANIFEST).read_text())["state"]
    return state


def faults(path: Path) -> list[str]:
    """What keeps a folder from being a whole checkpoint; empty when it is one."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files: dict[str, int] = manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"no readable {MANIFEST} ({type(error).__name__})"]
    problems = []
    for name, size in files.items():
        file = path / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size != size:
            problems.append(f"{name} has {file.stat().st_size} bytes, expected {size}")
    return problems


def _seal(draft: Path, step: int, state: Mapping[str, Any]) -> None:
    """Brings every file to the disk, then names them all with their sizes."""
    files = {}
    for file in sorted(p for p in draft.rglob("*") if p.is_file()):
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
        files[str(file.relative_to(draft))] = file.stat().st_size
    with (draft / MANIFEST).open("w") as handle:
        json.dump({"format": 1, "step": step, "files": files, "state": state}, handle, indent=1)
        handle.flush()
        os.fsync(handle.fileno())
    for folder in {draft, *(p for p in draft.rglob("*") if p.is_dir())}:
        _fsync_folder(folder)


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
