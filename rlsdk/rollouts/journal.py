"""The journal of a run: every start, sample, publish and step is a line, so that the run can be resumed and replayed.

Append-only, in segments of whole lines. Each segment begins at a checkpoint, so that segments before the oldest kept
checkpoint can be removed. A line that a kill truncated is the last of its segment and is not read.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from rlsdk.interfaces import CheckpointError, GenerationOutput, GenerationRequest
from rlsdk.rollouts.group import GroupTask, Sample
from rlsdk.rollouts.records import record_of, unfinished_record

FOLDER = "journal"
"""Name of the journal folder in a run's folder."""
FORMAT = 1
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=True).encode
_NAME = "segment_{order:06d}_step_{step:08d}.jsonl"


class Journal:
    """Writes the journal. Thread-safe; written lines survive the end of this process."""

    def __init__(self, folder: Path, *, made_by: str, keep: Literal["resume", "all"]) -> None:
        """Opens nothing yet.

        Args:
            folder: folder of the run's journal; created if missing.
            made_by: identifies everything that samples and their grades depend on; see `read_journal`.
            keep: `resume`: segments that no checkpoint needs are removed; `all`: the whole run can be replayed.
        """
        self._folder = folder
        self._made_by = made_by
        self._keep = keep
        self._lock = threading.Lock()
        self._file: int | None = None
        self._behind: list[str] = []
        """Sample lines that are written with the next write."""

    def open(self, step: int) -> None:
        """Starts a segment after this step. New runs, resumed runs and checkpoints do this."""
        self._folder.mkdir(parents=True, exist_ok=True)
        order = max((segment.order for segment in segments(self._folder)), default=-1) + 1
        path = self._folder / _NAME.format(order=order, step=step)
        with self._lock:
            self._append("")
            if self._file is not None:
                os.fsync(self._file)
                os.close(self._file)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        self.write("open", step=step, format=FORMAT, made_by=self._made_by)

    def write(self, event: str, **values: Any) -> None:
        """Writes one line atomically, with the time in seconds since the epoch."""
        line = _line(event, values)
        with self._lock:
            self._append(line)

    def sample(self, task: GroupTask, name: str, index: int, sample: Sample) -> None:
        """Buffers a graded sample; `name` distinguishes a greedy baseline. It is in the file after the next `write` or
        `put_down`: hundreds of samples that arrive together cost one system call."""
        record = record_of(sample, task.prompt.prompt_ids)
        line = _line("sample", {"group": task.ordinal, "name": name, "sample": index, **record})
        with self._lock:
            self._behind.append(line)

    def put_down(self) -> None:
        """Writes the buffered samples to the file."""
        with self._lock:
            self._append("")

    def unfinished(self, request: GenerationRequest, output: GenerationOutput) -> None:
        """Records the partial output of a stopped sample."""
        self.write("unfinished", **unfinished_record(request, output))

    def flush(self) -> None:
        """Syncs the file to the disk, so that it survives a machine failure."""
        with self._lock:
            self._append("")
            if self._file is not None:
                os.fsync(self._file)

    def forget(self, oldest_step: int) -> None:
        """Removes segments that are not needed: every kept checkpoint is of this step or a later one."""
        if self._keep == "all":
            return
        found = segments(self._folder)
        for segment, following in pairwise(found):
            if following.step > oldest_step or segment.step >= oldest_step:
                return
            segment.path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Removes the journal of an earlier run."""
        for segment in segments(self._folder):
            segment.path.unlink(missing_ok=True)

    def close(self) -> None:
        with self._lock:
            self._append("")
            if self._file is not None:
                os.fsync(self._file)
                os.close(self._file)
                self._file = None

    def _append(self, line: str) -> None:
        """Writes a line after the buffered ones. The caller holds the lock."""
        text, self._behind = "".join([*self._behind, line]), []
        left = memoryview(b"" if self._file is None else text.encode())
        while self._file is not None and left:
            left = left[os.write(self._file, left) :]


def _line(event: str, values: Mapping[str, Any]) -> str:
    return _encode({"event": event, "at": round(time.time(), 4), **values}) + "\n"


@dataclass(frozen=True, kw_only=True)
class Segment:
    path: Path
    order: int
    step: int
    """Number of steps done at its start."""


def segments(folder: Path) -> list[Segment]:
    """Segments of a journal, in the order of writing."""
    found = []
    for path in folder.glob("segment_*_step_*.jsonl"):
        order, _, step = path.stem.removeprefix("segment_").partition("_step_")
        if order.isdecimal() and step.isdecimal():
            found.append(Segment(path=path, order=int(order), step=int(step)))
    return sorted(found, key=lambda segment: segment.order)


def lines(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Every whole line, in the order of writing.

    Raises:
        CheckpointError: a line within a segment is damaged.
    """
    for segment in segments(folder):
        with segment.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # truncated by a kill
                try:
                    found = json.loads(line)
                    found["event"]
                except (ValueError, TypeError, KeyError) as error:
                    raise CheckpointError(
                        f"{segment.path}, line {number}, cannot be read ({error}). `--schedule.journal none` goes on "
                        "without the journal: what was not trained is made again"
                    ) from error
                yield found


SampleKey = tuple[str, int]
"""Name and index of a sample within its group."""


@dataclass(kw_only=True)
class Recorded:
    """The journal's records of the steps after a checkpoint."""

    samples: dict[int, dict[SampleKey, Mapping[str, Any]]] = field(default_factory=dict)
    """Sample records by ordinal of the group."""
    trained: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Groups that each step trained on, by step."""
    updates: dict[int, Mapping[str, float]] = field(default_factory=dict)
    """Metrics of each step's updates, by step."""
    unfinished: dict[tuple[int, int], Mapping[str, Any]] = field(default_factory=dict)
    """Records of stopped samples, by seed of the request and index of the sample."""

    def no_newer(self, version: int) -> Recorded:
        """Returns only samples whose tokens are all of this version or older, without the planned steps."""
        kept = {
            ordinal: {key: record for key, record in group.items() if _newest(record) <= version}
            for ordinal, group in self.samples.items()
        }
        unfinished = {
            key: record for key, record in self.unfinished.items() if _newest({"spans": [record["span"]]}) <= version
        }
        return Recorded(samples=kept, updates=self.updates, unfinished=unfinished)


def read_journal(folder: Path, *, after: int, made_by: str | None = None) -> Recorded:
    """Reads the records of the steps after `after`. Of steps repeated after a resume only the repetition counts.

    Args:
        folder: folder of the journal.
        after: number of steps already done.
        made_by: records of other runs, or of this run with another configuration, are ignored; None: none are ignored.

    Raises:
        CheckpointError: a line is damaged.
    """
    found, done, counts = Recorded(), set[int](), True
    for line in lines(folder):
        match line["event"]:
            case "open":
                counts = line["format"] == FORMAT and made_by in (None, line["made_by"])
            case _ if not counts:
                continue
            case "sample":
                group = found.samples.setdefault(int(line["group"]), {})
                group[str(line["name"]), int(line["sample"])] = line
            case "unfinished":
                found.unfinished[int(line["seed"]), int(line["sample"])] = line
            case "train" if int(line["step"]) > after:
                found.trained[int(line["step"])] = tuple(map(int, line["groups"]))
            case "train":
                done.update(map(int, line["groups"]))
            case "update" if int(line["step"]) > after:
                found.updates[int(line["step"])] = line["figures"]
    again = {group for groups in found.trained.values() for group in groups}
    for ordinal in done - again:
        found.samples.pop(ordinal, None)
    return found


def _newest(record: Mapping[str, Any]) -> int:
    runs = [run for span in record["spans"] or () if span is not None for run in span.get("versions", ())]
    return max((int(version) for version, _ in runs), default=-1)


def account(folder: Path) -> dict[int, str]:
    """State of every group that was started: `trained in step K`, `rejected in step K`, or `waiting`."""
    fate: dict[int, str] = {}
    for line in lines(folder):
        match line["event"]:
            case "start":
                fate |= {int(group): "waiting" for group in line["groups"] if int(group) not in fate}
            case "update":
                step = int(line["step"])
                fate |= {int(group): f"trained in step {step}" for group in line["groups"]}
                fate |= {int(group): f"rejected in step {step}" for group in line["rejected"]}
    return fate
