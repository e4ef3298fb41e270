"""The controller's end of one grading process: start it, send it items, read its records, kill it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsdk.interfaces import DataError, RewardSample
from rlsdk.rewards.definitions import FailureKind, RewardDef, RewardLimits
from rlsdk.rewards.protocol import Record, Tag, encode_message, take_records

_PIPE_BYTES = 1 << 20


@dataclass
class Task:
    """Items that one process grades, in order."""

    items: Sequence[tuple[int, int]]
    """(index of the reward, index of the sample)."""
    together: bool = False
    """One call of a batched function for all of them."""
    graded: int = 0
    """Items whose record has come."""

    @property
    def rest(self) -> Sequence[tuple[int, int]]:
        return self.items[self.graded :]


class GradingProcess:
    """One child process in a session of its own. Never blocks for longer than it is told to."""

    def __init__(self, rewards: Sequence[RewardDef], limits: RewardLimits, log_path: Path | None) -> None:
        """Starts it and returns at once; `batched` is set when it is ready."""
        self.limits = limits
        self.batched: list[bool] | None = None
        self.task: Task | None = None
        self.retired = False
        """It takes no more items: its memory is not to be trusted."""
        self.deadline = time.monotonic() + limits.start_timeout_s
        self._buffer = bytearray()
        self._popen, self._requests, self._records, self._lifeline = _spawn()
        setup = {
            "rewards": [{"target": reward.target, "options": dict(reward.options)} for reward in rewards],
            "memory_mb": limits.memory_mb,
            "log_path": None if log_path is None else str(log_path),
        }
        with contextlib.suppress(OSError):  # it died at once: whoever reads from it will see
            self._write(encode_message(setup))

    @property
    def idle(self) -> bool:
        """It is ready for a task."""
        return self.batched is not None and self.task is None

    def fileno(self) -> int:
        """Readable when there are records, or when the process is gone."""
        return self._records

    def send(self, task: Task, samples: Sequence[RewardSample]) -> None:
        """Hands a task over.

        Raises:
            OSError: the process is gone, or takes nothing.
            DataError: a row holds more than JSON types.
        """
        data = _encode_task(task, samples)
        self.task = task
        self.deadline = self._next_deadline()
        self._write(data)

    def read(self) -> Iterator[Record]:
        """Records that have come, each counted for the task. Raises `EOFError` when no more will come."""
        try:
            data = os.read(self._records, _PIPE_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise EOFError
        self._buffer += data
        for record in take_records(self._buffer):
            self._count(record)
            yield record

    def kill(self) -> str:
        """Ends it with everything that it started, and says how it ended. What it wrote can still be read."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody of its group is left
            os.killpg(self._popen.pid, signal.SIGKILL)
        return _ended(self._popen.wait())

    def close(self) -> None:
        """Kills it and frees what this end holds. Safe to call twice."""
        if self._records >= 0:
            self.kill()
            for fd in (self._requests, self._records, self._lifeline):
                os.close(fd)
            self._requests = self._records = self._lifeline = -1

    def is_gone(self) -> bool:
        """It has ended by itself."""
        return self._popen.poll() is not None

    def _count(self, record: Record) -> None:
        if record.tag is Tag.READY and record.body is not None:
            self.batched = list(record.body["batched"])
        elif record.tag in (Tag.VALUE, Tag.FAILED) and self.task is not None:
            self.task.graded += 1
            self.retired = record.body is not None and record.body["kind"] == FailureKind.MEMORY
            self.deadline = self._next_deadline()
        elif record.tag is Tag.SINGLY and self.task is not None:
            self.task.together = False
            self.deadline = self._next_deadline()
        elif record.tag is Tag.DONE:
            self.task = None

    def _next_deadline(self) -> float:
        together = self.task is not None and self.task.together
        return time.monotonic() + (self.limits.batched_timeout_s if together else self.limits.timeout_s)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._requests, view) :]
            except BlockingIOError:
                wait_s = max(0.0, self.deadline - time.monotonic())
                if not select.select([], [self._requests], [], wait_s)[1]:
                    raise TimeoutError("the grading process takes no input") from None


def _spawn() -> tuple[subprocess.Popen[bytes], int, int, int]:
    """Starts the interpreter with this one's module path; pipes: requests to it, records from it, its lifeline."""
    pipes = [os.pipe() for _ in range(3)]
    (request_in, request_out), (record_in, record_out), (life_in, life_out) = pipes
    path = [*sys.path, str(Path.cwd())]  # the current folder last, so that nothing in it hides an installed module
    code = (
        f"import sys; sys.path[:] = {path!r}; from rlsdk.rewards.child import main; "
        f"main({request_in}, {record_out}, {life_in})"
    )
    try:
        popen = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(request_in, record_out, life_in),
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **os.environ},
        )
    finally:
        for fd in (request_in, record_out, life_in):
            os.close(fd)
    os.set_blocking(request_out, False)
    os.set_blocking(record_in, False)
    _widen(request_out)
    return popen, request_out, record_in, life_out


def _widen(fd: int) -> None:
    """Lets a whole batch fit into the pipe, where the system allows it: fewer switches between the two processes."""
    if sys.platform == "linux":
        import fcntl

        with contextlib.suppress(OSError):  # the system's own size serves as well
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def _encode_task(task: Task, samples: Sequence[RewardSample]) -> bytes:
    """The samples of the task, with prompt, answer and row of each prompt sent once however many samples it has."""
    local: dict[int, int] = {}
    contexts: dict[tuple[int, str], int] = {}
    rows: list[tuple[str, str | None, Mapping[str, Any]]] = []
    encoded = []
    for _, at in task.items:
        if at in local:
            continue
        local[at] = len(local)
        sample = samples[at]
        context = contexts.setdefault((id(sample.row), sample.prompt), len(contexts))
        if context == len(rows):
            rows.append((sample.prompt, sample.answer, sample.row))
        encoded.append((context, sample.response, sample.truncated))
    items = [(reward, local[at]) for reward, at in task.items]
    try:
        return encode_message({"contexts": rows, "samples": encoded, "items": items, "together": task.together})
    except (TypeError, ValueError) as error:
        raise DataError(f"a sample cannot be sent for grading: {error}{_first_bad_row(rows)}") from error


def _first_bad_row(rows: Sequence[tuple[str, str | None, Mapping[str, Any]]]) -> str:
    for _, _, row in rows:
        for name, value in row.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                return f"; field {name!r} of its row is a {type(value).__name__}, expected JSON types"
    return ""


def _ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
