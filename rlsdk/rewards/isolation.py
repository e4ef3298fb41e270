"""Runs each call in its own forked process: for reward functions that execute what a model wrote.

Such code may do anything to the process that it runs in. Therefore that process has no channel to the controller,
grades only this call, and is killed with all its descendants; its changes in memory are lost, and nothing reaches
another sample. It can still choose its own value, because it runs where that value is computed.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rlsdk.rewards.definitions import FailureKind, RewardLimits
from rlsdk.rewards.outcomes import Failed, Graded, NonsenseError, Outcome, check_graded, check_number, failed
from rlsdk.rewards.protocol import write_all
from rlsdk.rewards.system_calls import filter_system_calls

_MAX_BYTES = 64 << 20
_NOT_PROTECTED = 97
"""Exit status of a fork in which the filter failed although it worked before."""
_LENGTH = struct.Struct("<Q")


def call_apart(
    call: Callable[[], Sequence[Outcome] | None], count: int, keep: int, limits: RewardLimits
) -> tuple[Sequence[Outcome] | None, int]:
    """Runs `call` in a fork; returns its outcomes and the fork's wait status. Outcomes are None if they are invalid.

    Args:
        count: outcomes that are expected.
        keep: file descriptor of the log, which the fork may use besides the standard ones.
        limits: on returned values.
    """
    keep_attributes = not limits.allow_writes and why_attributes_change() is None
    readable, writable = os.pipe()
    before = _children()
    child = os.fork()
    if child == 0:
        _serve(call, writable, keep, limits, keep_attributes)
    os.close(writable)
    try:
        data = _read(readable)
    finally:
        os.close(readable)
        status = _end(child)
        for other in _children() - before:
            _end(other)
    return _decode(data, count, limits), status


@cache
def why_attributes_change() -> str | None:
    """Reason why forks here cannot be prevented from changing permissions, owners and times of files; None if they can.
    Tested in a fork, as a filter is permanent."""
    if sys.platform != "linux":
        return f"{sys.platform} has no seccomp"
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writable, (filter_system_calls(network=True, attributes=False) or "").encode())
        finally:
            os._exit(0)
    os.close(writable)
    with open(readable, encoding="utf-8") as stream:
        problem = stream.read()
    os.waitpid(child, 0)
    return problem or None


def describe_status(status: int) -> Outcome:
    """The failure of a sample whose process ended with this status and no value."""
    code = os.waitstatus_to_exitcode(status)
    how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    return failed(FailureKind.CRASH, f"the process died: {how}")


def _serve(
    call: Callable[[], Sequence[Outcome] | None], writable: int, keep: int, limits: RewardLimits, keep_attributes: bool
) -> None:
    """Runs in the fork: it has only the standard file descriptors, the log's and its channel back.

    Args:
        keep_attributes: it cannot change permissions, owners and times of files; without that nothing is called.
    """
    with contextlib.suppress(BaseException):
        low, high = sorted((writable, keep))
        for first, last in ((3, low), (low + 1, high), (high + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])):
            os.closerange(first, last)
        if keep_attributes:
            problem = filter_system_calls(network=limits.allow_network, attributes=False)
            if problem is not None:
                print(f"this sample is not graded: seccomp: {problem}", flush=True)
                os._exit(_NOT_PROTECTED)
        process = os.getpid()
        outcomes = call()
        if os.getpid() == process:
            data = json.dumps(None if outcomes is None else [_to_json(outcome) for outcome in outcomes]).encode()
            write_all(writable, _LENGTH.pack(len(data)) + data)
    os._exit(0)


def _read(readable: int) -> bytes:
    """Reads until the fork has sent everything, or has closed its end: a child of its own may keep it open."""
    parts = bytearray()
    end = _LENGTH.size
    while len(parts) < end:
        part = os.read(readable, 1 << 16)
        if not part:
            break
        parts += part
        if end == _LENGTH.size and len(parts) >= end:
            end += min(_LENGTH.unpack_from(parts)[0], _MAX_BYTES)
    return bytes(parts[_LENGTH.size :])


def _to_json(outcome: Outcome) -> Any:
    """A number as itself; other outcomes as a mapping."""
    if isinstance(outcome, float):
        return outcome
    if isinstance(outcome, Failed):
        return {"kind": outcome.kind.value, "message": outcome.message}
    tokens = None if outcome.token_scores is None else outcome.token_scores.tolist()
    return {"score": outcome.score, "token_scores": tokens, "metrics": dict(outcome.metrics)}


def _decode(data: bytes, count: int, limits: RewardLimits) -> Sequence[Outcome] | None:
    try:
        given = json.loads(data)
        if not isinstance(given, list) or len(given) != count:
            return None
        return [_from_json(outcome, limits) for outcome in given]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


def _from_json(given: Any, limits: RewardLimits) -> Outcome:
    """Raises `ValueError`, `KeyError` or `TypeError` for what is no outcome: the fork may have written anything."""
    if isinstance(given, float):
        return check_number(given, limits)
    if set(given) == {"kind", "message"}:
        return failed(FailureKind(given["kind"]), str(given["message"]))
    if set(given) != {"score", "token_scores", "metrics"}:
        raise NonsenseError(FailureKind.TYPE, "no outcome")
    found: Graded = check_graded(given["score"], given["token_scores"], given["metrics"], limits)
    return found


def _end(child: int) -> int:
    """Kills a child and reaps its status: its own exit status, if it had already ended."""
    status = 0
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
    return status


def _children() -> set[int]:
    """Children of this process, including adopted ones; empty if the system does not report them."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found.update(map(int, path.read_text().split()))
    return found
