"""Protocol between the controller and a grading process, over two pipes: JSON and numbers, no pickle.

To the process: messages, each a 4-byte length and lines of JSON. From the process: records, each with a tag, the nonce
of its task, the index of its item, a 4-byte length and a payload. A record is written as soon as an item is graded, so
if the process dies or hangs, the first item without a record caused it. Data without the nonce of the current task was
written by something else, and ends the process.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

NONCE_BYTES = 8
NO_NONCE = bytes(NONCE_BYTES)
"""Nonce of records sent before the first task."""
MAX_RECORD_BYTES = 1 << 20
"""Largest size of a record without token scores."""

_LENGTH = struct.Struct("<I")
_HEADER = struct.Struct(f"<B{NONCE_BYTES}sII")
_DOUBLE = struct.Struct("<d")
_GRADED = struct.Struct("<?d?I")
"""Header of a RECORD: whether there is a score, the score, whether there are token scores, their number. They follow as
8-byte floats, then the metrics as JSON."""


class Tag(IntEnum):
    """Kind of a record."""

    READY = 1
    """JSON: which functions are batched, and the confinement. The process now accepts messages."""
    REFUSED = 2
    """JSON: a reward function cannot be loaded. The process ends."""
    VALUE = 3
    """A double (float64): the item's reward."""
    FAILED = 4
    """JSON: why the item has no reward."""
    SINGLY = 5
    """JSON: why the batched call failed; its items are graded one by one."""
    DONE = 6
    """Empty: all items of the message are graded."""
    RECORD = 7
    """The item's score, token scores and metrics, or that the reward does not apply (`encode_graded`)."""


RESULTS = (Tag.VALUE, Tag.FAILED, Tag.RECORD)
"""Tags of records with the result of an item."""


_TAGS = {int(tag): tag for tag in Tag}


class ForeignRecordError(ValueError):
    """Something other than the grading process wrote to its channel, or it is out of sync."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record, decoded."""

    tag: Tag
    nonce: bytes = NO_NONCE
    item: int = 0
    """Index of the item in its task."""
    value: float = 0.0
    body: Mapping[str, Any] | None = None
    """Decoded JSON; for a RECORD, its `score`, `token_scores` and `metrics`."""


def encode_message(body: Mapping[str, Any], lines: Sequence[bytes] = ()) -> bytes:
    """Encodes a header and lines of JSON. Raises `TypeError` or `ValueError` if JSON cannot represent the header."""
    data = b"\n".join([json.dumps(body).encode(), *lines])
    return _LENGTH.pack(len(data)) + data


def read_message(fd: int) -> tuple[dict[str, Any], list[bytes]] | None:
    """Waits for the next message, a header and lines; None if the other end is closed."""
    head = _read_exactly(fd, _LENGTH.size)
    data = _read_exactly(fd, _LENGTH.unpack(head)[0]) if head else None
    if not data:
        return None
    header, *lines = data.split(b"\n")
    return json.loads(header), lines


def encode_record(tag: Tag, body: Mapping[str, Any] | None = None, *, nonce: bytes = NO_NONCE, item: int = 0) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    return _HEADER.pack(tag, nonce, item, len(data)) + data


def encode_value(value: float, *, nonce: bytes = NO_NONCE, item: int = 0) -> bytes:
    return _HEADER.pack(Tag.VALUE, nonce, item, _DOUBLE.size) + _DOUBLE.pack(value)


def encode_graded(
    score: float | None,
    token_scores: NDArray[np.float64] | None,
    metrics: Mapping[str, float],
    *,
    nonce: bytes = NO_NONCE,
    item: int = 0,
) -> bytes:
    """Encodes a RECORD. `score` None: the reward does not apply."""
    count = 0 if token_scores is None else len(token_scores)
    data = _GRADED.pack(score is not None, score or 0.0, token_scores is not None, count)
    data += b"" if token_scores is None else token_scores.astype("<f8", copy=False).tobytes()
    data += json.dumps(dict(metrics)).encode() if metrics else b"{}"
    return _HEADER.pack(Tag.RECORD, nonce, item, len(data)) + data


def take_records(buffer: bytearray, max_bytes: int = MAX_RECORD_BYTES) -> Iterator[Record]:
    """Yields the complete records at the start of `buffer`, and removes them after the last one.

    Args:
        buffer: bytes read so far.
        max_bytes: maximum payload of one record.

    Raises:
        ForeignRecordError: the next bytes are not a record.
    """
    at = 0
    while len(buffer) - at >= _HEADER.size:
        tag, nonce, item, length = _HEADER.unpack_from(buffer, at)
        end = at + _HEADER.size + length
        known = _TAGS.get(tag)
        if known is None or length > max_bytes:
            raise ForeignRecordError("bytes that are not a record")
        if end > len(buffer):
            break
        yield _decode(known, nonce, item, bytes(buffer[at + _HEADER.size : end]))
        at = end
    del buffer[:at]


def write_all(fd: int, data: bytes) -> None:
    """Writes to a blocking file descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _decode(tag: Tag, nonce: bytes, item: int, data: bytes) -> Record:
    try:
        if tag is Tag.VALUE:
            return Record(tag, nonce, item, _DOUBLE.unpack(data)[0])
        if tag is Tag.RECORD:
            return Record(tag, nonce, item, 0.0, _read_graded(data))
        return Record(tag, nonce, item, 0.0, json.loads(data) if data else None)
    except (struct.error, ValueError) as error:
        raise ForeignRecordError("a record that cannot be decoded") from error


def _read_graded(data: bytes) -> dict[str, Any]:
    """Decodes the parts of a RECORD without validating them."""
    has_score, score, has_tokens, count = _GRADED.unpack_from(data)
    end = _GRADED.size + 8 * count
    if end > len(data):
        raise ValueError("token scores are missing")
    tokens = np.frombuffer(data, "<f8", count, _GRADED.size) if has_tokens else None
    return {"score": score if has_score else None, "token_scores": tokens, "metrics": json.loads(data[end:])}


def _read_exactly(fd: int, size: int) -> bytes | None:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
