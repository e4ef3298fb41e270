"""Atomic checkpoints: written to a temporary folder, sealed by a manifest, and renamed into place."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rlsdk.interfaces import CheckpointError
from rlsdk.interfaces.spelling import Setting
from rlsdk.kit.files.adapter_config import holds_adapter
from rlsdk.kit.files.write_errors import AGAIN, way_out
from rlsdk.system.atomic import atomic_write_bytes
from rlsdk.system.files import read_regular
from rlsdk.trainer.checkpoints.manifest import (
    MANIFEST,
    has_checksum,
    read_manifest,
    seal,
    sealed_text,
    sync_folder,
    wrong_contents,
    wrong_sizes,
)

__all__ = [
    "MANIFEST",
    "MODEL_FOLDER",
    "BestRecord",
    "CheckpointFolder",
    "CheckpointStore",
    "damage",
    "faults",
    "is_checkpoint_name",
    "older_whole",
    "read_state",
    "step_of",
]

MODEL_FOLDER = "model"
"""Folder in a checkpoint: the policy in Hugging Face format."""
BEST_FILE = "best.json"
"""File next to the checkpoints that names the best one."""
MAX_BEST_BYTES = 1 << 16
_NAME = re.compile(r"step_(\d{8,16})")
_REPLACED = re.compile(r"\.(step_\d{8,16})\.old")


@dataclass(frozen=True, kw_only=True)
class CheckpointFolder:
    """A folder with a checkpoint's name, whole or damaged."""

    path: Path
    step: int
    order: int
    """See `Manifest.order`; -1 where the manifest cannot be read."""
    problems: tuple[str, ...]
    """Reason why it is not whole, by its manifest and file sizes; empty if it is whole."""


class BestRecord(BaseModel):
    """Content of `best.json`: the best checkpoint, and the metric that decided it."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    step: int = Field(ge=0, lt=2**53)
    metric: str
    mode: Literal["max", "min"]
    value: float = Field(allow_inf_nan=False)

    def line(self) -> str:
        """One line of text."""
        return f"step {self.step}, {self.metric} {self.value:.4g}"


class CheckpointStore:
    """The folder `checkpoints/` of a run: `step_00000010/` and so on, each sealed by a manifest of its files.

    A writer that dies leaves a folder whose name starts with a dot. The next writer removes it, except for the earlier
    copy of a step that was being rewritten: where the new copy is missing, the earlier one counts.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    @contextmanager
    def write(self, step: int, state: Mapping[str, Any], *, best: BestRecord | None = None) -> Iterator[Path]:
        """Yields an empty folder to fill; on a clean exit it becomes the checkpoint of `step`.

        Afterwards it keeps only the last `keep` checkpoints written, the best one, and the newest one with a model:
        higher steps of an earlier attempt are removed.

        Args:
            step: step of the checkpoint.
            state: stored in its manifest.
            best: the record if this checkpoint is the best one so far; None: it is not.

        Raises:
            CheckpointError: it could not be written; earlier checkpoints are unchanged.
        """
        final = self.folder / _name(step)
        draft = self.folder / f".{final.name}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.recover()
            draft.mkdir()
            try:
                yield draft
                order = 1 + max((checkpoint.order for checkpoint in self.find()), default=0)
                seal(draft, step=step, order=order, state=state)
                if final.exists():
                    os.replace(final, self.folder / f".{final.name}.old")
                os.replace(draft, final)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
            sync_folder(self.folder)
        except OSError as error:
            raise CheckpointError(
                f"cannot write checkpoint {final}: {error}; earlier ones are untouched. "
                f"{way_out(error, final)}, {AGAIN}"
            ) from error
        self.recover()
        if best is not None:
            self.mark_best(best)
        marked = self.best()
        kept = {self._newest_with_model(), *([marked.step] if marked is not None else ())}
        for step_of_old, old in self.whole()[: -self.keep or None]:
            if step_of_old in kept:
                continue
            # Renamed first: a kill in the middle of the removal must not leave a folder that looks whole.
            doomed = self.folder / f".{old.name}.gone"
            os.replace(old, doomed)
            _remove(doomed)

    def _newest_with_model(self) -> int | None:
        """Step of the newest whole checkpoint that holds a model in Hugging Face form."""
        return next((step for step, path in reversed(self.whole()) if holds_model(path)), None)

    def best(self) -> BestRecord | None:
        """The best checkpoint by `best.json`; None if the file is missing or unreadable, or the checkpoint is not
        whole."""
        try:
            raw = read_regular(self.folder / BEST_FILE, MAX_BEST_BYTES)
            content = json.loads(raw)
            if not isinstance(content, dict) or (content.pop("checksum", None) is not None and not has_checksum(raw)):
                return None
            record = BestRecord.model_validate_json(json.dumps(content))
        except (OSError, ValueError, RecursionError):
            return None
        return None if faults(self.folder / _name(record.step)) else record

    def mark_best(self, record: BestRecord | None) -> None:
        """Records the best checkpoint, which is then kept; None: there is none.

        Raises:
            CheckpointError: it could not be written.
        """
        try:
            if record is None:
                (self.folder / BEST_FILE).unlink(missing_ok=True)
            else:
                atomic_write_bytes(self.folder / BEST_FILE, sealed_text(record.model_dump_json(indent=1)))
        except OSError as error:
            file = self.folder / BEST_FILE
            raise CheckpointError(f"cannot write {file}: {error}. {way_out(error, file)}, {AGAIN}") from error

    def path_of(self, step: int) -> Path:
        """Path of the folder for the checkpoint of a step."""
        return self.folder / _name(step)

    def find(self) -> list[CheckpointFolder]:
        """Every folder with a checkpoint's name, damaged ones included, in the order of writing (by step where the
        manifest cannot be read). Reads manifests and sizes, no content."""
        if not self.folder.is_dir():
            return []
        paths = {path.name: path for path in self.folder.iterdir() if path.is_dir()}
        replaced = {match[1]: path for name, path in paths.items() if (match := _REPLACED.fullmatch(name))}
        named = {**replaced, **{name: path for name, path in paths.items() if _NAME.fullmatch(name)}}
        checkpoints = [_look(path, int(name.removeprefix("step_"))) for name, path in named.items()]
        order_of = {item.step: item.order for item in checkpoints if not item.problems}
        return sorted(
            checkpoints, key=lambda item: (order_of.get(item.step, _order_before(item.step, order_of)), item.step)
        )

    def whole(self) -> list[tuple[int, Path]]:
        """Step and folder of every whole checkpoint, the oldest first, by manifest and sizes."""
        return [(item.step, item.path) for item in self.find() if not item.problems]

    def newest(self) -> Path | None:
        """The checkpoint that was written last, by manifest and sizes; see `newest_intact` for one to load."""
        return next((path for _, path in reversed(self.whole())), None)

    def newest_intact(self, notice: Callable[[str], None], part: str | None = None) -> Path | None:
        """The newest checkpoint whose checksums all match; None if the folder has no checkpoint at all.

        Args:
            notice: receives one line for each newer checkpoint that is damaged.
            part: the only folder in the checkpoint that is verified; if any checkpoint has it, those without it are
                skipped. None: everything is verified.

        Raises:
            CheckpointError: there are checkpoints, but all are damaged; names each.
        """
        refused: list[str] = []
        for item in reversed(self.find()):
            if part is not None and not item.problems and not (item.path / part).is_dir() and self._has(part):
                continue
            problems = item.problems or tuple(damage(item.path, part))
            if not problems:
                for line in refused:
                    notice(f"warning: skipped the damaged checkpoint {line}; resuming from {item.path}")
                return item.path
            refused.append(f"{item.path} ({'; '.join(problems[:3])})")
        if refused:
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged: {', '.join(refused)}. Restore one from a copy, or "
                f"start from scratch with {Setting('trainer.resume', 'never')}"
            )
        return None

    def _has(self, part: str) -> bool:
        return any((path / part).is_dir() for _, path in self.whole())

    def recover(self) -> None:
        """Removes leftovers of writers that died, and restores the earlier copy of a half-replaced step. Only for the
        process that holds the run's lock."""
        for leftover in self.folder.glob(".step_*"):
            replaced = _REPLACED.fullmatch(leftover.name)
            if replaced and not (self.folder / replaced[1]).exists():
                os.replace(leftover, self.folder / replaced[1])
            else:
                _remove(leftover)


def _remove(folder: Path) -> None:
    """Removes a checkpoint's folder; of a link in its place, only the link."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def read_state(path: Path) -> dict[str, Any]:
    """Returns the `state` that was passed to `CheckpointStore.write` for this checkpoint.

    Raises:
        CheckpointError: the folder is not a complete checkpoint; says what is wrong with it.
    """
    if problems := faults(path):
        raise CheckpointError(f"{path} is not a whole checkpoint: {'; '.join(problems[:3])}")
    return read_manifest(path).state


def step_of(path: Path) -> int:
    """The step of a whole checkpoint.

    Raises:
        CheckpointError: its manifest cannot be read.
    """
    return read_manifest(path).step


def faults(path: Path) -> list[str]:
    """Reasons why a folder is not a whole checkpoint, by its manifest and file sizes; empty if it is whole. Fast: reads
    no content."""
    try:
        return wrong_sizes(path, read_manifest(path))
    except CheckpointError as error:
        return [str(error)]


def damage(path: Path, part: str | None = None) -> list[str]:
    """As `faults`, and compares the checksums of all files, or of those in the folder `part` of the checkpoint."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    return wrong_sizes(path, manifest) or wrong_contents(path, manifest, part)


def holds_model(path: Path) -> bool:
    """Whether a checkpoint contains the policy: a model in Hugging Face format, or an adapter of one (see
    `trainer.export_every_steps`)."""
    return is_model(path / MODEL_FOLDER)


def is_model(folder: Path) -> bool:
    """Whether a folder is a model in Hugging Face format, or an adapter of one in PEFT's."""
    return (folder / "config.json").is_file() or holds_adapter(folder)


def is_checkpoint_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def older_whole(path: Path) -> str:
    """Text that lists other checkpoints to resume from if the one at `path` is refused; may be empty."""
    others = [str(other) for _, other in CheckpointStore(path.parent, 1).whole() if other.name != path.name]
    if not others:
        return "; there is no other complete checkpoint in this folder"
    listed = ", ".join(reversed(others[-3:]))
    return f"; complete checkpoints in this folder: {listed} (take one with {Setting('trainer.resume', 'PATH')})"


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _look(path: Path, step: int) -> CheckpointFolder:
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return CheckpointFolder(path=path, step=step, order=-1, problems=(str(error),))
    problems = wrong_sizes(path, manifest)
    if manifest.step != step:
        problems.insert(0, f"{MANIFEST} is of step {manifest.step}")
    return CheckpointFolder(path=path, step=step, order=manifest.order, problems=tuple(problems))


def _order_before(step: int, order_of: Mapping[int, int]) -> float:
    """Sort key of a checkpoint without a readable manifest: after all those of lower steps."""
    return max((order for other, order in order_of.items() if other < step), default=0) + 0.5
