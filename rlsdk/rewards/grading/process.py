"""The controller's side of one grading process: starts it, sends tasks, reads records, kills it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlsdk.confinement.environment import allowed_environment
from rlsdk.interfaces.settings import RewardLimits, shared
from rlsdk.interfaces.spelling import reader
from rlsdk.rewards.grading.protocol import (
    MAX_RECORD_BYTES,
    NO_NONCE,
    RESULTS,
    ForeignRecordError,
    Record,
    Tag,
    encode_message,
    take_records,
)
from rlsdk.rewards.grading.submission import Task
from rlsdk.rewards.scores.definitions import FailureKind, RewardDef
from rlsdk.system.exit_codes import describe_exit
from rlsdk.system.import_path import child_environment, import_folders
from rlsdk.system.temporary import HeldFolder

_PIPE_BYTES = 1 << 20
_FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT, -signal.SIGQUIT}
"""Exit codes that the function may not have caused: the system's out-of-memory killer, an operator, a closed
terminal."""


class GradingProcess:
    """One child process in its own session. Methods never block longer than the limits allow."""

    def __init__(self, rewards: Sequence[RewardDef], limits: RewardLimits, log_path: Path | None) -> None:
        """Starts the process and returns immediately; `ready` is set when the process has loaded the functions."""
        self.limits = limits
        self.ready: dict[str, Any] | None = None
        """Report of the process: which functions are `batched`, and its confinement (`held`, `missing`)."""
        self.task: Task | None = None
        self.began = 0.0
        """Start time of the current item (monotonic seconds)."""
        self.retired = False
        """Whether it gets no more items, because it ran out of memory."""
        self.deadline = time.monotonic() + limits.start_timeout_s
        self._buffer = bytearray()
        self._folder = HeldFolder("grading")
        self._scratch = self._folder.path
        self._popen, self._requests, self._records, self._lifeline = _spawn(limits)
        setup = {
            "rewards": [{"target": reward.target, "options": dict(reward.options)} for reward in rewards],
            "limits": shared(limits, RewardLimits),
            "log_path": None if log_path is None else str(log_path),
            "scratch": self._scratch,
            "reader": None if (call := reader()) is None else asdict(call),
        }
        with contextlib.suppress(OSError):  # it died immediately; `read` will notice
            self._write(encode_message(setup))

    @property
    def idle(self) -> bool:
        """Whether it is ready for a task."""
        return self.ready is not None and self.task is None

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self._popen.pid

    def fileno(self) -> int:
        """File descriptor that is readable if there are records, or if the process has ended."""
        return self._records

    def send(self, task: Task) -> None:
        """Sends a task. Raises `OSError` if the process has ended, or does not read."""
        self.task = task
        self.began = time.monotonic()
        self.deadline = self._next_deadline()
        self._write(task.encode())

    def read(self) -> Iterator[Record]:
        """Reads the available records, and counts them for the task.

        Raises:
            EOFError: the process has closed its end.
            ForeignRecordError: something else wrote to the channel.
        """
        try:
            data = os.read(self._records, _PIPE_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise EOFError
        self._buffer += data
        limit = max(MAX_RECORD_BYTES, self.limits.max_record_bytes)
        for record in take_records(self._buffer, limit):
            self._check(record)
            self._count(record)
            yield record

    def kill(self) -> int:
        """Kills the process with all its descendants; returns its exit code, negative for a signal.

        Records that it wrote can still be read.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):  # no process of its group is left
            os.killpg(self._popen.pid, signal.SIGKILL)
        return self._popen.wait()

    def end(self) -> int | None:
        """Waits up to 1 s for the process to end, then kills it with its descendants.

        Returns its exit code; None if it had closed its channel but was still running.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(1.0)  # its end of the pipe closes shortly before the process is gone
        code = self._popen.poll()
        self.kill()
        return code

    def close(self) -> None:
        """Kills the process and frees the resources of this side. Safe to call twice."""
        if self._records >= 0:
            self.kill()
            for fd in (self._requests, self._records, self._lifeline):
                os.close(fd)
            self._requests = self._records = self._lifeline = -1
            self._folder.close()

    def is_gone(self) -> bool:
        """Whether it has ended."""
        return self._popen.poll() is not None

    def is_stopped(self) -> bool:
        """Whether a signal has stopped it: it sends nothing until another signal continues it."""
        if self._popen.poll() is not None or not hasattr(os, "waitid"):
            return False
        with contextlib.suppress(ChildProcessError):
            state = os.waitid(os.P_PID, self._popen.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
            return state is not None
        return False

    def _check(self, record: Record) -> None:
        """Checks that a record belongs to the current task, and to its next item."""
        task = self.task
        if record.tag in (Tag.READY, Tag.REFUSED):
            in_step = self.ready is None and record.nonce == NO_NONCE and record.body is not None
        else:
            in_step = task is not None and record.nonce == task.nonce
        if in_step and task is not None and record.tag in RESULTS:
            in_step = record.item == task.graded < len(task.items)
        if not in_step:
            raise ForeignRecordError("a record that does not belong to the current item")

    def _count(self, record: Record) -> None:
        if record.tag is Tag.READY and record.body is not None:
            self.ready = dict(record.body)
        elif record.tag in RESULTS and self.task is not None:
            self.task.graded += 1
            self.task.attempts = 1
            self.retired = record.body is not None and record.body.get("kind") == FailureKind.MEMORY
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
                poller = select.poll()
                poller.register(self._requests, select.POLLOUT)
                if not poller.poll(wait_s * 1000):
                    raise TimeoutError("the grading process does not read its input") from None


def came_from_outside(code: int | None) -> bool:
    """Whether a process with this exit code may have been killed from outside."""
    return code in _FROM_OUTSIDE


def describe_end(code: int | None) -> str:
    """Returns an exit code as text: `exit code 3`, `signal SIGSEGV`."""
    return "it closed its channel" if code is None else describe_exit(code)


def _spawn(limits: RewardLimits) -> tuple[subprocess.Popen[bytes], int, int, int]:
    """Starts an interpreter that imports what this one can.

    Returns the process, and our ends of its pipes: requests to it, records from it, its lifeline.
    """
    pipes = [os.pipe() for _ in range(3)]
    (request_in, request_out), (record_in, record_out), (life_in, life_out) = pipes
    code = (
        f"import sys; sys.path += [path for path in {import_folders()!r} if path not in sys.path]; "
        f"from rlsdk.rewards.grading.child import main; main({request_in}, {record_out}, {life_in})"
    )
    try:
        popen = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(request_in, record_out, life_in),
            start_new_session=True,
            env=allowed_environment(child_environment(), limits.environment),
        )
    finally:
        for fd in (request_in, record_out, life_in):
            os.close(fd)
    os.set_blocking(request_out, False)
    os.set_blocking(record_in, False)
    _widen(request_out)
    return popen, request_out, record_in, life_out


def _widen(fd: int) -> None:
    """Enlarges the pipe for a whole batch, if the system allows it: fewer switches between the two processes."""
    if sys.platform == "linux":
        import fcntl

        with contextlib.suppress(OSError):  # the default size works too
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
