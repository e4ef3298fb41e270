"""The files of a journal: segments of lines that are chained by checksums.

The checksum of a line (XXH3-64, the last member of its object) covers the line and the checksum before it; the first
line of a segment continues from the name of its file. So a line that was changed, removed, repeated or moved is found,
and so is a segment under another's name. A line without an end is what a kill left: it ends its segment.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import xxhash

from rlsdk.interfaces import CheckpointError
from rlsdk.interfaces.spelling import Setting

FORMAT = 2
MAX_LINE_BYTES = 1 << 28
"""Largest line in bytes; a larger one was not written by rlsdk."""
_NAME = "segment_{order:06d}_step_{step:08d}.jsonl"
_SUM = b',"sum":"'
_END = b'"}\n'
_DIGITS = 16
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=True).encode


@dataclass(frozen=True, kw_only=True)
class Segment:
    path: Path
    order: int
    step: int
    """Number of steps done at its start."""

    @classmethod
    def of(cls, folder: Path, order: int, step: int) -> Segment:
        return cls(path=folder / _NAME.format(order=order, step=step), order=order, step=step)

    @property
    def first_sum(self) -> str:
        """Checksum from which its first line continues."""
        return xxhash.xxh3_64_hexdigest(f"{self.order}/{self.step}".encode())


@dataclass(frozen=True, kw_only=True)
class Header:
    """The first line of a segment."""

    segment: Segment
    run: str
    """Identity of the run that wrote it."""
    begins: bool
    """Whether a process of the run begins with it; False: it follows the segment before it, at a checkpoint."""
    reached: int
    """The segments before it have no samples of later steps; a group is of the step that trains it at the latest."""
    follows: tuple[int, str] | None
    """Order and last checksum of the segment before it; None: its writer did not read that segment."""
    newest: int | None
    """Newest policy version of earlier records that its process used; None: it used all."""
    made_by: Mapping[str, Any]
    """See `Journal`."""


def segments(folder: Path) -> list[Segment]:
    """Segments of a journal, in the order of writing."""
    listed = []
    for path in folder.glob("segment_*_step_*.jsonl"):
        order, _, step = path.stem.removeprefix("segment_").partition("_step_")
        if order.isdecimal() and step.isdecimal():
            listed.append(Segment(path=path, order=int(order), step=int(step)))
    return sorted(listed, key=lambda segment: (segment.order, segment.step))


def whole_segments(folder: Path) -> list[Segment]:
    """As `segments`; old ones may be removed, but none in between.

    Raises:
        CheckpointError: a segment is missing, or there are two of one number.
    """
    listed = segments(folder)
    for before, after in pairwise(listed):
        if after.order == before.order:
            raise damaged(folder, f"{folder} has two segments {after.order}: {before.path.name}, {after.path.name}")
        if after.order != before.order + 1:
            raise damaged(
                folder, f"{folder} lacks segment {before.order + 1}, between {before.path.name} and {after.path.name}"
            )
    return listed


def body_of(line: Mapping[str, Any]) -> bytes:
    """A line without its checksum and its end; `line` is not empty."""
    return _encode(line).encode()[:-1]


def chained(body: bytes, previous: str) -> tuple[bytes, str]:
    """The whole line, and its checksum; `previous` is that of the line before it."""
    own = _checksum(body, previous)
    return b"".join((body, _SUM, own.encode(), _END)), own


def read_segment(segment: Segment) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yields the whole lines of a segment, each with its checksum.

    Raises:
        CheckpointError: a line is damaged, or the segment is of another format.
    """
    previous = segment.first_sum
    for number, raw in _raw_lines(segment):
        body, own = raw[: -len(_SUM) - _DIGITS - len(_END)], _checksum_of(raw)
        if own is None or own != _checksum(body, previous):
            if number == 1 and (other := _other_format(raw)) is not None:
                raise _bad_line(
                    segment, number, f"format {other} of another version, which can finish the run; this is {FORMAT}"
                )
            raise _bad_line(segment, number, "its checksum differs: it was changed, or one before it moved or removed")
        previous = own
        try:
            line = json.loads(body + b"}")
            if not isinstance(line["event"], str):
                raise TypeError(f"event is {line['event']!r}")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise unreadable(segment.path, number, error) from error
        yield line, own


def read_header(segment: Segment) -> Header | None:
    """The first line of a segment; None: the writer was killed before it was written.

    Raises:
        CheckpointError: it is damaged, or of another format.
    """
    for line, _ in read_segment(segment):
        try:
            if line["event"] != "open" or line["format"] != FORMAT or not isinstance(line["made_by"], dict):
                raise ValueError(f"event {line['event']!r} of format {line.get('format')!r}")
            follows = line["follows"]
            return Header(
                segment=segment,
                run=str(line["run"]),
                begins=bool(line["begins"]),
                reached=int(line["reached"]),
                follows=None if follows is None else (int(follows[0]), str(follows[1])),
                newest=None if line["newest"] is None else int(line["newest"]),
                made_by=line["made_by"],
            )
        except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
            raise unreadable(segment.path, 1, error) from error
    return None


def has_records(segment: Segment) -> bool:
    """Whether a segment has more than its first line."""
    return any(number > 1 for number, _ in _raw_lines(segment))


def read_headers(folder: Path) -> list[tuple[Segment, Header | None]]:
    """Every segment of a journal with its first line, in the order of writing.

    Raises:
        CheckpointError: a segment is missing, or a first line is damaged or missing.
    """
    headers = [(segment, read_header(segment)) for segment in whole_segments(folder)]
    empty = {segment.order: segment.path for segment, header in headers if header is None}
    for _, header in headers:
        if header is not None and header.follows is not None and header.follows[0] in empty:
            raise damaged(folder, f"{empty[header.follows[0]]} lost its lines, which a later segment goes on from")
    return headers


def read_all(chosen: Sequence[tuple[Segment, Header | None]]) -> Iterator[tuple[Header, int, Mapping[str, Any], str]]:
    """Yields every whole line of consecutive segments: header of its segment, number, content, checksum.

    Raises:
        CheckpointError: a line is damaged, or a segment ends before the next one says.
    """
    end: tuple[int, str] | None = None
    for segment, header in chosen:
        if header is None:
            continue
        if None not in (end, header.follows) and end != header.follows:
            folder, name = segment.path.parent, segment.path.name
            raise damaged(folder, f"{folder} lacks lines before {name}: the segment before it was longer")
        for number, (line, own) in enumerate(read_segment(segment), 1):
            end = segment.order, own
            yield header, number, line, own


def lines(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Every whole line of a journal, in the order of writing.

    Raises:
        CheckpointError: a line or a segment is damaged or missing.
    """
    for _, _, line, _ in read_all(read_headers(folder)):
        yield line


def damaged(folder: Path, problem: str) -> CheckpointError:
    """The error of a journal in `folder` that cannot be trusted, with the way out."""
    return CheckpointError(
        f"{problem}. Restore the journal from a copy; or a resume continues without it, after "
        f"`mv {shlex.quote(str(folder))} {shlex.quote(f'{folder}.damaged')}` or with "
        f"`{Setting('schedule.journal', 'none')}`: what was not trained on is generated again"
    )


def unreadable(file: Path, number: int, error: Exception) -> CheckpointError:
    """The error of a line whose content is not what rlsdk writes."""
    return damaged(file.parent, f"{file}, line {number}, cannot be read ({type(error).__name__}: {error})")


def _raw_lines(segment: Segment) -> Iterator[tuple[int, bytes]]:
    """Yields number and bytes of each line that has an end."""
    try:
        # A pipe or a device in its place would block the reader.
        if not segment.path.is_file():
            raise damaged(segment.path.parent, f"{segment.path} is not a regular file")
        with segment.path.open("rb") as file:
            number = 0
            while raw := file.readline(MAX_LINE_BYTES):
                number += 1
                if not raw.endswith(b"\n"):
                    if len(raw) == MAX_LINE_BYTES:
                        raise _bad_line(segment, number, f"it has more than {MAX_LINE_BYTES:,} bytes")
                    return  # truncated by a kill
                yield number, raw
    except OSError as error:
        raise damaged(segment.path.parent, f"{segment.path} cannot be read ({error.strerror})") from error


def _checksum(body: bytes, previous: str) -> str:
    return xxhash.xxh3_64_hexdigest(body, seed=int(previous, 16))


def _checksum_of(raw: bytes) -> str | None:
    """The checksum at the end of a line; None if it has none."""
    tail = raw[-len(_SUM) - _DIGITS - len(_END) :]
    if not tail.startswith(_SUM) or not tail.endswith(_END):
        return None
    return tail[len(_SUM) : -len(_END)].decode("ascii", "replace")


def _bad_line(segment: Segment, number: int, why: str) -> CheckpointError:
    return damaged(segment.path.parent, f"{segment.path}, line {number}, cannot be read: {why}")


def _other_format(raw: bytes) -> str | None:
    """The format of a journal that another version wrote, from its first line; None if it is damaged."""
    try:
        line = json.loads(raw)
        known = line["event"] == "open" and line["format"] != FORMAT
        return repr(line["format"])[:40] if known else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
