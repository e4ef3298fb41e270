"""Runs each call in its own forked process, for reward functions that execute model output.

Such code may do anything to its process. So the process has no channel to the controller, runs only this call, and is
killed with all its descendants. Its changes in memory are lost, so they cannot affect another sample. The code can
still forge the value of its own sample, because it runs in the process that computes the value.
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

from rlsdk.confinement.system_calls import filter_system_calls
from rlsdk.interfaces.settings import RewardLimits
from rlsdk.rewards.grading.protocol import write_all
from rlsdk.rewards.scores.definitions import FailureKind
from rlsdk.rewards.scores.outcomes import Failed, Graded, NonsenseError, Outcome, check_graded, check_number, failed
from rlsdk.system.exit_codes import describe_exit

_MAX_BYTES = 64 << 20
_MAX_TEXT = 400
_NOT_PROTECTED = 97
"""Exit status of a fork in which the filter failed although it worked before."""
_LENGTH = struct.Struct("<Q")


def call_in_fork(
    call: Callable[[], Sequence[Outcome] | str], count: int, keep: int, limits: RewardLimits
) -> tuple[Sequence[Outcome] | str | None, int]:
    """Runs `call` in a fork; returns its outcomes or its text (None if both are invalid), and the fork's wait status.

    Args:
        call: the function to run.
        count: expected number of outcomes.
        keep: file descriptor of the log, which the fork keeps besides the standard ones.
        limits: limits on returned values.
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
    """Returns why this system cannot stop forks from changing permissions, owners and times of files; None if it can.

    Tested in a fork, because a filter is permanent.
    """
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


def describe_status(status: int) -> Failed:
    """Returns the failure of a sample whose process ended with this status and without a value."""
    return failed(FailureKind.CRASH, f"the process died: {describe_exit(os.waitstatus_to_exitcode(status))}")


def _serve(
    call: Callable[[], Sequence[Outcome] | str], writable: int, keep: int, limits: RewardLimits, keep_attributes: bool
) -> None:
    """Runs in the fork, which keeps only the standard file descriptors, the log, and the channel back.

    Args:
        keep_attributes: block changes of permissions, owners and times of files; if that fails, do not run the call.
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
            text = outcomes if isinstance(outcomes, str) else [_to_json(outcome) for outcome in outcomes]
            data = json.dumps(text).encode()
            write_all(writable, _LENGTH.pack(len(data)) + data)
    os._exit(0)


def _read(readable: int) -> bytes:
    """Reads until the fork has sent everything or closed its end. Stops after the announced length, because a child of
    the fork may keep the pipe open."""
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
    """Encodes a number as it is, and other outcomes as a mapping."""
    if isinstance(outcome, float):
        return outcome
    if isinstance(outcome, Failed):
        return {"kind": outcome.kind.value, "message": outcome.message}
    tokens = None if outcome.token_scores is None else outcome.token_scores.tolist()
    return {"score": outcome.score, "token_scores": tokens, "metrics": dict(outcome.metrics)}


def _decode(data: bytes, count: int, limits: RewardLimits) -> Sequence[Outcome] | str | None:
    try:
        decoded = json.loads(data)
        if isinstance(decoded, str):
            return decoded[:_MAX_TEXT]
        if not isinstance(decoded, list) or len(decoded) != count:
            return None
        return [_from_json(outcome, limits) for outcome in decoded]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


def _from_json(outcome: Any, limits: RewardLimits) -> Outcome:
    """Decodes an outcome. The fork may have written anything: raises `ValueError`, `KeyError` or `TypeError`."""
    if isinstance(outcome, float):
        return check_number(outcome, limits)
    if set(outcome) == {"kind", "message"}:
        return failed(FailureKind(outcome["kind"]), str(outcome["message"]))
    if set(outcome) != {"score", "token_scores", "metrics"}:
        raise NonsenseError(FailureKind.TYPE, "not an outcome")
    graded: Graded = check_graded(outcome["score"], outcome["token_scores"], outcome["metrics"], limits)
    return graded


def _end(child: int) -> int:
    """Kills a child and returns its wait status; that of its own exit, if it had already ended."""
    status = 0
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
    return status


def _children() -> set[int]:
    """Returns the children of this process, including adopted ones; empty if the system does not report them."""
    children: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children.update(map(int, path.read_text().split()))
    return children
