"""Calls in a forked process of their own: for reward functions that run what a model wrote.

Such code may do anything to the process that it runs in. So that process has no way to the controller, grades this one
call, and is ended with all that it started; what it changes in memory is gone, and nothing of it reaches another
sample. It can still choose its own value: it stands where that value is computed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rlsdk.rewards.definitions import FailureKind
from rlsdk.rewards.protocol import Tag, write_all

Outcome: TypeAlias = tuple[Tag, float | Mapping[str, Any]]
"""A value, or a failure's kind and message."""

_MAX_BYTES = 16 << 20


def call_apart(
    call: Callable[[], Sequence[Outcome] | None], count: int, keep: int
) -> tuple[Sequence[Outcome] | None, int]:
    """What `call` gives, computed in a fork, and the fork's wait status; None where it gave no such thing.

    Args:
        count: outcomes that are expected.
        keep: a file descriptor that the fork may use besides the standard ones: of the log.
    """
    readable, writable = os.pipe()
    before = _children()
    child = os.fork()
    if child == 0:
        _serve(call, writable, keep)
    os.close(writable)
    try:
        data = _read(readable)
    finally:
        os.close(readable)
        status = _end(child)
        for other in _children() - before:
            _end(other)
    return _decode(data, count), status


def describe_status(status: int) -> Outcome:
    """The failure of a sample whose process ended with this status and no value."""
    code = os.waitstatus_to_exitcode(status)
    how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    return Tag.FAILED, {"kind": FailureKind.CRASH.value, "message": f"the process died: {how}"}


def _serve(call: Callable[[], Sequence[Outcome] | None], writable: int, keep: int) -> None:
    """The fork's whole life: it has no file descriptor but the standard ones, the log's and its way back."""
    with contextlib.suppress(BaseException):
        low, high = sorted((writable, keep))
        for first, last in ((3, low), (low + 1, high), (high + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])):
            os.closerange(first, last)
        process = os.getpid()
        outcomes = call()
        if os.getpid() == process:
            write_all(writable, json.dumps(outcomes).encode())
    os._exit(0)


def _read(readable: int) -> bytes:
    """Until the fork has closed its end, or has said all: a child of its own may hold it open."""
    parts = bytearray()
    while len(parts) < _MAX_BYTES:
        part = os.read(readable, 1 << 16)
        if not part:
            break
        parts += part
        with contextlib.suppress(ValueError):
            json.loads(parts)
            break
    return bytes(parts)


def _decode(data: bytes, count: int) -> Sequence[Outcome] | None:
    try:
        outcomes = [(Tag(tag), content) for tag, content in json.loads(data)]
    except (TypeError, ValueError, RecursionError):
        return None
    return outcomes if len(outcomes) == count and all(map(_is_outcome, outcomes)) else None


def _is_outcome(outcome: tuple[Tag, Any]) -> bool:
    tag, content = outcome
    if tag is Tag.VALUE:
        return isinstance(content, float) and math.isfinite(content)
    if tag is not Tag.FAILED or not isinstance(content, dict):
        return False
    return content.get("kind") in list(FailureKind) and isinstance(content.get("message"), str)


def _end(child: int) -> int:
    """Kills a child and takes its status: the one that it ended with by itself, where it did."""
    status = 0
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
    return status


def _children() -> set[int]:
    """Processes whose parent is this one, adopted ones included; empty where the system does not tell."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found.update(map(int, path.read_text().split()))
    return found
