"""Trackers receive a run's metrics. Each tracker is registered by name and built from a `TrackerContext`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rlsdk.interfaces import TrackerContext
from rlsdk.system.atomic import atomic_path
from rlsdk.system.files import open_regular, regular_lines

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
MAX_READ_BYTES = 1 << 30
"""Largest such file that is read as a whole, for a page or a table. Resuming reads them line by line."""


WARM_START = "sft/"
"""Prefix of the metrics of supervised training. Its steps and those of RL both count from 1; this prefix tells them
apart."""


def is_warm_start(metrics: Mapping[str, Any]) -> bool:
    """Whether a line of metrics is from supervised training."""
    return any(name.startswith(WARM_START) for name in metrics)


class JsonlTracker:
    """`metrics.jsonl` and `samples.jsonl` in the run's folder: one object per line, flushed line by line.

    A resumed run drops the lines after the step that it continues from, because it writes them again. The files stay
    unchanged until the first line is logged: until then the run may still be refused.
    """

    option_names: Collection[str] = ()

    def __init__(self, context: TrackerContext) -> None:
        self._folder = Path(context.run_dir)
        self._resume_step = context.resume_step
        self._metrics: TextIO | None = None
        self._samples: TextIO | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        file, _ = self._open(warm_start=is_warm_start(metrics))
        file.write(json.dumps({"step": step, **metrics}) + "\n")

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        _, file = self._open(warm_start=False)
        for sample in samples:
            file.write(json.dumps({"step": step, **sample}) + "\n")

    def close(self) -> None:
        with ExitStack() as files:  # closes each, even if another cannot be flushed
            for file in (self._metrics, self._samples):
                if file is not None:
                    files.callback(file.close)

    def _open(self, *, warm_start: bool) -> tuple[TextIO, TextIO]:
        """Opens the two files; `warm_start`: whether the first metrics logged after a resume are from supervised
        training."""
        if self._metrics is None or self._samples is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            metrics, samples = self._folder / METRICS_FILE, self._folder / SAMPLES_FILE
            if self._resume_step is not None:
                drop_repeated(metrics, self._resume_step, warm_start=warm_start)
                drop_repeated(samples, self._resume_step, warm_start=warm_start)
            self._metrics, self._samples = _open_lines(metrics), _open_lines(samples)
        return self._metrics, self._samples


def drop_repeated(path: Path, step: int, *, warm_start: bool) -> None:
    """Rewrites a JSONL file without the lines that a run resumed at `step` writes again, and without truncated lines.

    Args:
        path: the file; may be missing.
        step: step of the checkpoint.
        warm_start: whether it is a checkpoint of supervised training: all lines of RL are then repeated. Otherwise all
            lines of supervised training stay.
    """
    if not path.exists():
        return
    with atomic_path(path) as draft, draft.open("w", encoding="utf-8") as kept:
        for line in _whole_lines(path):
            kept_phase = is_warm_start(line) and not warm_start
            same_phase = is_warm_start(line) == warm_start
            if kept_phase or (same_phase and line["step"] <= step):
                kept.write(json.dumps(line) + "\n")


def _whole_lines(path: Path, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields the objects with a step number; skips lines that a killed process truncated."""
    for text in regular_lines(path, limit):
        try:
            line = json.loads(text.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            yield line


def _open_lines(path: Path) -> TextIO:
    """Opens a file for appending; first ends a last line that a killed process truncated."""
    torn = False
    if path.is_file():
        with open_regular(path) as kept:
            torn = kept.seek(0, os.SEEK_END) > 0 and kept.seek(-1, os.SEEK_END) >= 0 and kept.read(1) != b"\n"
    file = path.open("a", buffering=1, encoding="utf-8")
    if torn:
        file.write("\n")
    return file


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, without lines that a killed process truncated.

    Raises:
        UnfitFileError: it is no regular file, or larger than `MAX_READ_BYTES`.
    """
    return list(_whole_lines(path, MAX_READ_BYTES)) if path.exists() else []


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """One object per step, in order. Merges the lines of one step; later values take precedence."""
    steps: dict[int, dict[str, Any]] = {}
    for line in read_lines(run_dir / METRICS_FILE):
        steps.setdefault(int(line["step"]), {}).update(line)
    return [steps[step] for step in sorted(steps)]


class TensorBoardTracker:
    """Event files under `tensorboard/` of the run's folder; supervised training has its own under `tensorboard/sft/`.

    A resumed run tells TensorBoard to forget the steps that it repeats (the `purge_step` of its writers).
    """

    option_names: Collection[str] = ()

    def __init__(self, context: TrackerContext) -> None:
        self._folder = Path(context.run_dir) / "tensorboard"
        self._resume_step = context.resume_step
        self._writers: dict[bool, EventFileWriter] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        writer = self._writer(warm_start=is_warm_start(metrics))
        writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=values)))

    def _writer(self, *, warm_start: bool) -> EventFileWriter:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if warm_start not in self._writers:
            writer = EventFileWriter(str(self._folder / "sft" if warm_start else self._folder))
            if self._resume_step is not None:
                # RL that follows a resumed warm start begins at its first step again.
                first = self._resume_step + 1 if not self._writers else 0
                start = SessionLog(status=SessionLog.START)
                writer.add_event(Event(step=first, wall_time=time.time(), session_log=start))
            self._writers[warm_start] = writer
        return self._writers[warm_start]

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Does nothing: samples are in `samples.jsonl` and the report."""

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
