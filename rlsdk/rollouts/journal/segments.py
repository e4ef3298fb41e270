"""The files of a journal: segments of binary records that are chained by checksums.

A record is 12 bytes of head, its content and 8 bytes of checksum, little-endian:

    uint32  bytes of the JSON
    uint32  bytes of the arrays
    uint32  CRC-32 of these two, continued from the low half of the checksum before it
    JSON    an object in UTF-8; its member `arrays`, if any, has type and length of each array: i5, f5
    arrays  one behind another
    uint64  XXH3-64 of all before it in the record, seeded with the checksum before it

The first record of a segment continues from the name of its file. So a record that was changed, removed, repeated or
moved is found, and so is a segment under another's name. A record whose head is whole, and that is longer than the
rest of its file, is what a kill left, and so is less than a head: it ends its segment.
"""

from __future__ import annotations

import json
import shlex
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from rlsdk.interfaces import CheckpointError
from rlsdk.interfaces.spelling import Setting

FORMAT = 3
MAX_RECORD_BYTES = 1 << 28
"""Largest record in bytes; a larger one was not written by rlsdk."""
DTYPES = {"i": "<i4", "q": "<i8", "f": "<f4", "d": "<f8", "?": "|b1"}
"""Of arrays in records, by the letter that stands for it."""
ARRAYS = "arrays"
"""Member of a record: the arrays that its other members name by number."""
SUFFIX = ".journal"
_NAME = "segment_{order:06d}_step_{step:08d}" + SUFFIX
_SIZES, _CHECK, _SUM = struct.Struct("<II"), struct.Struct("<I"), struct.Struct("<Q")
_HEAD_BYTES = _SIZES.size + _CHECK.size
_LETTERS = {dtype: letter for letter, dtype in DTYPES.items()}
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=True).encode
Body = tuple[bytes, Sequence[NDArray[Any]]]
"""JSON and arrays of a record."""


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
    def first_sum(self) -> int:
        """Checksum from which its first record continues."""
        return xxhash.xxh3_64_intdigest(f"{self.order}/{self.step}".encode())


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a reader of a segment goes on."""

    offset: int
    """Bytes before it."""
    number: int
    """Records before it."""
    checksum: int
    """Of the record before it."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """The first record of a segment."""

    segment: Segment
    run: str
    """Identity of the run that wrote it."""
    begins: bool
    """Whether a process of the run begins with it; False: it follows the segment before it, at a checkpoint."""
    reached: int
    """The segments before it have no samples of later steps; a group is of the step that trains it at the latest."""
    follows: tuple[int, int] | None
    """Order and last checksum of the segment before it; None: its writer did not read that segment."""
    newest: int | None
    """Newest policy version of earlier records that its process used; None: it used all."""
    made_by: Mapping[str, Any]
    """See `Journal`."""


def segments(folder: Path) -> list[Segment]:
    """Segments of a journal, in the order of writing."""
    listed = []
    for path in folder.glob("segment_*_step_*"):
        order, _, step = path.stem.removeprefix("segment_").partition("_step_")
        if path.suffix in (SUFFIX, ".jsonl") and order.isdecimal() and step.isdecimal():  # .jsonl: of older formats
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


def body_of(record: Mapping[str, Any]) -> Body:
    """A record without its head and its checksum."""
    arrays: Sequence[NDArray[Any]] = record.get(ARRAYS, ())
    if not arrays:
        return _encode(record).encode(), ()
    shapes = [f"{_LETTERS[array.dtype.str]}{len(array)}" for array in arrays]
    return _encode({**record, ARRAYS: shapes}).encode(), arrays


def chained(body: Body, previous: int) -> tuple[list[bytes | memoryview], int]:
    """The parts of the whole record, and its checksum; `previous` is that of the record before it."""
    text, arrays = body
    sizes = _SIZES.pack(len(text), sum([array.nbytes for array in arrays]))
    head = b"".join((sizes, _CHECK.pack(_head_check(sizes, previous)), text))
    hashed = xxhash.xxh3_64(head, seed=previous)
    data = [array.data for array in arrays]
    for part in data:
        hashed.update(part)
    own = hashed.intdigest()
    return [head, *data, _SUM.pack(own)], own


def read_segment(segment: Segment, since: Place | None = None) -> Iterator[tuple[Mapping[str, Any], Place]]:
    """Yields the whole records of a segment, each with the place behind it; arrays are views of the record's bytes.

    Args:
        segment: of one folder.
        since: place of a record of which only later ones are read; None: all are.

    Raises:
        CheckpointError: a record is damaged, or the segment is of another format.
    """
    for text, data, place in _raw_records(segment, since):
        try:
            record = read_body(text, data)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise unreadable(segment.path, place.number, error) from error
        yield record, place


def read_body(text: bytes, data: memoryview) -> Mapping[str, Any]:
    """The record of a JSON and the bytes of its arrays, of which its arrays are views.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: it is not one.
    """
    record: dict[str, Any] = json.loads(text)
    if not isinstance(record["event"], str):
        raise TypeError(f"event is {record['event']!r}")
    arrays = list(_views(record.get(ARRAYS, ()), data))
    if arrays:
        record[ARRAYS] = arrays
    return record


def read_header(segment: Segment) -> Header | None:
    """The first record of a segment; None: the writer was killed before it was written.

    Raises:
        CheckpointError: it is damaged, or of another format.
    """
    for record, _ in read_segment(segment):
        try:
            if record["event"] != "open" or record["format"] != FORMAT or not isinstance(record["made_by"], dict):
                raise ValueError(f"event {record['event']!r} of format {record.get('format')!r}")
            follows = record["follows"]
            return Header(
                segment=segment,
                run=str(record["run"]),
                begins=bool(record["begins"]),
                reached=int(record["reached"]),
                follows=None if follows is None else (int(follows[0]), int(follows[1])),
                newest=None if record["newest"] is None else int(record["newest"]),
                made_by=record["made_by"],
            )
        except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
            raise unreadable(segment.path, 1, error) from error
    return None


def has_records(segment: Segment) -> bool:
    """Whether a segment has more than its first record."""
    return any(place.number > 1 for _, _, place in _raw_records(segment))


def read_headers(folder: Path) -> list[tuple[Segment, Header | None]]:
    """Every segment of a journal with its first record, in the order of writing.

    Raises:
        CheckpointError: a segment is missing, or a first record is damaged or missing.
    """
    headers = [(segment, read_header(segment)) for segment in whole_segments(folder)]
    empty = {segment.order: segment.path for segment, header in headers if header is None}
    for _, header in headers:
        if header is not None and header.follows is not None and header.follows[0] in empty:
            raise damaged(folder, f"{empty[header.follows[0]]} lost its records, which a later segment goes on from")
    return headers


def read_all(
    chosen: Sequence[tuple[Segment, Header | None]],
) -> Iterator[tuple[Header, Mapping[str, Any], Place]]:
    """Yields every whole record of consecutive segments: header of its segment, content, place behind it.

    Raises:
        CheckpointError: a record is damaged, or a segment ends before the next one says.
    """
    end: tuple[int, int] | None = None
    for segment, header in chosen:
        if header is None:
            continue
        if None not in (end, header.follows) and end != header.follows:
            folder, name = segment.path.parent, segment.path.name
            raise damaged(folder, f"{folder} lacks records before {name}: the segment before it was longer")
        for record, place in read_segment(segment):
            end = segment.order, place.checksum
            yield header, record, place


def records(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Every whole record of a journal, in the order of writing.

    Raises:
        CheckpointError: a record or a segment is damaged or missing.
    """
    for _, record, _ in read_all(read_headers(folder)):
        yield record


def damaged(folder: Path, problem: str) -> CheckpointError:
    """The error of a journal in `folder` that cannot be trusted, with the way out."""
    return CheckpointError(
        f"{problem}. Restore the journal from a copy; or a resume continues without it, after "
        f"`mv {shlex.quote(str(folder))} {shlex.quote(f'{folder}.damaged')}` or with "
        f"`{Setting('schedule.journal', 'none')}`: what was not trained on is generated again"
    )


def unreadable(file: Path, number: int, error: Exception) -> CheckpointError:
    """The error of a record whose content is not what rlsdk writes."""
    return damaged(file.parent, f"{file}, record {number}, cannot be read ({type(error).__name__}: {error})")


def _raw_records(segment: Segment, since: Place | None = None) -> Iterator[tuple[bytes, memoryview, Place]]:
    """Yields JSON and arrays of each whole record, with the place behind it."""
    place = since or Place(offset=0, number=0, checksum=segment.first_sum)
    try:
        # A pipe or a device in its place would block the reader.
        if not segment.path.is_file():
            raise damaged(segment.path.parent, f"{segment.path} is not a regular file")
        if segment.path.suffix != SUFFIX:
            why = f"it is of an older format of another version, which can finish the run; this is format {FORMAT}"
            raise damaged(segment.path.parent, f"{segment.path} cannot be read: {why}")
        with segment.path.open("rb") as file:
            file.seek(place.offset)
            while (found := _read_record(file, segment, place)) is not None:
                text, data, place = found
                yield text, data, place
    except OSError as error:
        raise damaged(segment.path.parent, f"{segment.path} cannot be read ({error.strerror})") from error


def _read_record(file: BinaryIO, segment: Segment, before: Place) -> tuple[bytes, memoryview, Place] | None:
    """The next record; None: there is none, or a kill truncated it."""
    number = before.number + 1
    head = file.read(_HEAD_BYTES)
    if len(head) < _HEAD_BYTES:
        return None
    if _CHECK.unpack_from(head, _SIZES.size)[0] != _head_check(head[: _SIZES.size], before.checksum):
        if not any(head) and _is_zero(file):
            return None  # a machine failure: the file system had the new length of the file, and not what is in it
        raise _bad_record(segment, number)
    text_bytes, data_bytes = _SIZES.unpack_from(head)
    size = text_bytes + data_bytes
    if size > MAX_RECORD_BYTES:
        raise _bad_record(segment, number, f"it has more than {MAX_RECORD_BYTES:,} bytes")
    body = file.read(size + _SUM.size)
    if len(body) < size + _SUM.size:
        return None
    (own,) = _SUM.unpack_from(body, size)
    content = memoryview(body)[:size]
    hashed = xxhash.xxh3_64(head, seed=before.checksum)
    hashed.update(content)
    if own != hashed.intdigest():
        raise _bad_record(segment, number)
    place = Place(offset=before.offset + _HEAD_BYTES + len(body), number=number, checksum=own)
    return bytes(content[:text_bytes]), content[text_bytes:], place


def _views(shapes: Any, data: memoryview) -> Iterator[NDArray[Any]]:
    """The arrays of a record.

    Raises:
        ValueError: they are not what the record says.
    """
    at = 0
    for shape in shapes:
        if not isinstance(shape, str) or shape[:1] not in DTYPES or not shape[1:].isdecimal():
            raise ValueError(f"array {shape!r:.40}; expected a letter of {', '.join(DTYPES)} and its length")
        dtype = np.dtype(DTYPES[shape[0]])
        size = int(shape[1:]) * dtype.itemsize
        if at + size > len(data):
            break
        yield np.frombuffer(data[at : at + size], dtype)
        at += size
    else:
        if at == len(data):
            return
    raise ValueError(f"arrays of {shapes!r:.200} in {len(data)} bytes")


def _is_zero(file: BinaryIO) -> bool:
    return not any(any(part) for part in iter(lambda: file.read(1 << 16), b""))


def _head_check(sizes: bytes, previous: int) -> int:
    return zlib.crc32(sizes, previous & 0xFFFFFFFF)


_CHANGED = "its checksum differs: it was changed, or one before it moved or removed"


def _bad_record(segment: Segment, number: int, why: str = _CHANGED) -> CheckpointError:
    return damaged(segment.path.parent, f"{segment.path}, record {number}, cannot be read: {why}")
