"""The journal of a run: every start, sample, publish and step is a record, so that it can be resumed and replayed.

Append-only, in segments of whole records. Each segment begins at a checkpoint or with a process, so that segments
before the oldest kept checkpoint can be removed. See `rlsdk.rollouts.journal.segments` for the form of the files.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from rlsdk.interfaces import CheckpointError, GenerationOutput, GenerationRequest, ToolUse, Turn
from rlsdk.kit.files.write_errors import OutputError, writing
from rlsdk.rollouts.groups.group import GroupTask, Sample
from rlsdk.rollouts.journal.recorded import Recorded, first_needed
from rlsdk.rollouts.journal.records import record_of, tool_record, turn_record, unfinished_record
from rlsdk.rollouts.journal.segments import FORMAT, Body, Segment, body_of, chained, read_header, segments

FOLDER = "journal"
"""Name of the journal folder in a run's folder."""

CHUNK_BYTES = 1 << 18
"""Least number of bytes of a write, where there are so many."""


class Journal:
    """Writes the journal. Thread-safe; written records survive the end of this process."""

    def __init__(self, folder: Path, *, made_by: Mapping[str, Any], keep: Literal["resume", "all"]) -> None:
        """Opens nothing yet.

        Args:
            folder: folder of the run's journal; created if missing.
            made_by: everything that samples and their grades depend on, by name, in JSON types; see `read_journal`.
            keep: `resume`: segments that no checkpoint needs are removed; `all`: the whole run can be replayed.
        """
        self._folder = folder
        self._made_by = made_by
        self._keep = keep
        self._lock = threading.Lock()
        self._file: int | None = None
        self._behind: list[Body] = []
        """Records of samples that are written with the next write."""
        self.run = secrets.token_hex(8)
        """Identity of the run, in every segment and in every checkpoint; a resumed run keeps it."""
        self._reached = 0
        """Newest step that groups were started for."""
        self._newest: int | None = None
        self._end: tuple[int, int] | None = None
        """Order of the segment of the last whole record, and its checksum."""
        self._segment: Segment | None = None
        self._sum = 0
        self._size = 0
        """Bytes of the whole records in the current segment."""
        self._failure: OutputError | None = None

    def follow(self, found: Recorded, newest: int | None) -> None:
        """Goes on from these records, of which samples of versions above `newest` are not used; None: all are."""
        self._reached, self._newest, self._end = found.reached, newest, found.end

    def open(self, step: int) -> None:
        """Starts a segment after this step. New runs, resumed runs and checkpoints do this.

        Raises:
            OutputError: it cannot be written.
        """
        with self._lock, self._writing():
            begins = self._segment is None
            self._close()
            self._folder.mkdir(parents=True, exist_ok=True)
            order = max((segment.order for segment in segments(self._folder)), default=-1) + 1
            newest = self._newest if begins else None
            self._reached = max(self._reached, step)
            self._segment = segment = Segment.of(self._folder, order, step)
            self._file = os.open(segment.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
            self._sum, self._size, self._failure = segment.first_sum, 0, None
            # fmt: off
            header = {"step": step, "format": FORMAT, "run": self.run, "begins": begins, "reached": self._reached,
                      "follows": self._end, "newest": newest, "made_by": self._made_by}
            # fmt: on
            self._append(_body("open", header))

    def write(self, event: str, **values: Any) -> None:
        """Writes one record, with the time in seconds since the epoch.

        Raises:
            OutputError: it cannot be written; nor is any later record of this segment.
        """
        body = _body(event, values)
        with self._lock, self._writing():
            self._append(body)
            if event == "start":
                self._reached = max(self._reached, values["step"])

    def sample(self, task: GroupTask, name: str, index: int, sample: Sample) -> None:
        """Buffers a graded sample; `name` distinguishes a greedy baseline. It is in the file after the next `write` or
        `flush`: hundreds of samples that arrive together cost one system call."""
        record = record_of(sample, task.prompt.prompt_ids)
        body = _body("sample", {"group": task.ordinal, "name": name, "sample": index, **record})
        with self._lock:
            self._behind.append(body)

    def turn(self, task: GroupTask, name: str, index: int, key: str, turn: Turn) -> None:
        """As `sample`, for a turn of one that is not finished; `key` is that of its call."""
        record = turn_record(key, turn)
        body = _body("turn", {"group": task.ordinal, "name": name, "sample": index, **record})
        with self._lock:
            self._behind.append(body)

    def tool(self, task: GroupTask, name: str, index: int, call: int, use: ToolUse) -> None:
        """As `turn`, for a call of a tool; `call` is its number in the episode."""
        body = _body("tool", {"group": task.ordinal, "name": name, "sample": index, **tool_record(call, use)})
        with self._lock:
            self._behind.append(body)

    def flush(self) -> None:
        """Writes the buffered samples to the file.

        Raises:
            OutputError: they cannot be written.
        """
        with self._lock, self._writing():
            self._append()

    def unfinished(self, request: GenerationRequest, output: GenerationOutput) -> None:
        """Records the partial output of a stopped sample."""
        self.write("unfinished", **unfinished_record(request, output))

    def sync(self) -> None:
        """Syncs the file to the disk, so that it survives a machine failure.

        Raises:
            OutputError: the disk refuses it.
        """
        with self._lock, self._writing():
            self._append()
            if self._file is not None:
                os.fsync(self._file)

    def forget(self, since: int) -> None:
        """Removes segments that no resume needs: without samples of later steps than `since`, the step of the oldest
        kept checkpoint."""
        if self._keep == "all":
            return
        with contextlib.suppress(CheckpointError, OSError):  # stays for the next resume to report
            headers = [(segment, read_header(segment)) for segment in segments(self._folder)]
            for segment, _ in headers[: first_needed(headers, since)]:
                segment.path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Removes the journal of an earlier run."""
        for segment in segments(self._folder):
            segment.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Writes the buffered samples, unless an earlier write failed, and closes the file."""
        with self._lock, contextlib.suppress(OutputError), self._writing():
            self._close()

    def _close(self) -> None:
        """The caller holds the lock. A failed write was reported when it happened."""
        if self._file is None:
            return
        try:
            if self._failure is None:
                self._append()
                os.fsync(self._file)
        finally:
            os.close(self._file)
            self._file, self._behind = None, []

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        return writing("the samples and events of the run", self._folder)

    def _append(self, *bodies: Body) -> None:
        """Writes records after the buffered ones. The caller holds the lock."""
        if self._failure is not None:
            raise self._failure
        if self._file is None:
            return
        bodies, self._behind = (*self._behind, *bodies), []
        parts: list[bytes | memoryview] = []
        own = self._sum
        for body in bodies:
            record, own = chained(body, own)
            parts += record
        size = self._size
        try:
            for chunk in _chunks(parts):
                left = memoryview(chunk)
                size += len(left)
                while left:
                    left = left[os.write(self._file, left) :]
        except OSError as error:
            self._fail(error)
            raise
        if bodies and self._segment is not None:
            self._sum, self._size, self._end = own, size, (self._segment.order, own)

    def _fail(self, error: OSError) -> None:
        """Removes a record that was written in part, after which nothing could be read, and refuses later ones."""
        assert self._file is not None
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, self._size)
        try:
            with self._writing():
                raise error
        except OutputError as failure:
            self._failure = failure


def _chunks(parts: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """The parts joined to pieces that stay in the processor's cache while they are written."""
    waiting: list[bytes | memoryview] = []
    size = 0
    for part in parts:
        waiting.append(part)
        size += len(part) if isinstance(part, bytes) else part.nbytes
        if size >= CHUNK_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


def _body(event: str, values: Mapping[str, Any]) -> Body:
    return body_of({"event": event, "at": round(time.time(), 4), **values})
