"""What the controller and a grading process say to each other, over two pipes. JSON and doubles, no pickle.

To the process: messages, a 4-byte length and JSON. Back from it: records, a tag, a 4-byte length and a payload. A
record is written as soon as an item is graded, so when the process dies or hangs, the first item without a record is
the one that did it.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

_LENGTH = struct.Struct("<I")
_HEADER = struct.Struct("<BI")
_DOUBLE = struct.Struct("<d")


class Tag(IntEnum):
    """What a record says."""

    READY = 1
    """JSON: which functions are batched. The process takes messages from now on."""
    REFUSED = 2
    """JSON: a reward function cannot be loaded. The process ends."""
    VALUE = 3
    """A double: the next item's reward."""
    FAILED = 4
    """JSON: the next item has no reward, and why."""
    SINGLY = 5
    """Empty: the batched call failed; its items follow one by one."""
    DONE = 6
    """Empty: the whole message is graded."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record, decoded."""

    tag: Tag
    value: float = 0.0
    body: Mapping[str, Any] | None = None


def encode_message(body: Mapping[str, Any]) -> bytes:
    """Raises `TypeError` or `ValueError` for what JSON does not know."""
    data = json.dumps(body).encode()
    return _LENGTH.pack(len(data)) + data


def read_message(fd: int) -> dict[str, Any] | None:
    """Blocks for the next message; None when the other end is closed."""
    head = _read_exactly(fd, _LENGTH.size)
    data = _read_exactly(fd, _LENGTH.unpack(head)[0]) if head else None
    body: dict[str, Any] | None = json.loads(data) if data else None
    return body


def encode_record(tag: Tag, body: Mapping[str, Any] | None = None) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    return _HEADER.pack(tag, len(data)) + data


def encode_value(value: float) -> bytes:
    return _HEADER.pack(Tag.VALUE, _DOUBLE.size) + _DOUBLE.pack(value)


def take_records(buffer: bytearray) -> Iterator[Record]:
    """Yields the whole records at the front of `buffer` and removes them when it is exhausted."""
    at = 0
    while len(buffer) - at >= _HEADER.size:
        tag, length = _HEADER.unpack_from(buffer, at)
        end = at + _HEADER.size + length
        if end > len(buffer):
            break
        if tag == Tag.VALUE:
            yield Record(Tag.VALUE, _DOUBLE.unpack_from(buffer, at + _HEADER.size)[0])
        else:
            yield Record(Tag(tag), 0.0, json.loads(buffer[at + _HEADER.size : end]) if length else None)
        at = end
    del buffer[:at]


def write_all(fd: int, data: bytes) -> None:
    """Writes to a blocking file descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read_exactly(fd: int, size: int) -> bytes | None:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
