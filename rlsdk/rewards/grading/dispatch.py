"""The thread that owns all grading processes: assigns tasks, collects records, replaces lost processes."""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlsdk.interfaces import ConfigError
from rlsdk.interfaces.settings import RewardLimits
from rlsdk.rewards.grading.process import GradingProcess, came_from_outside, describe_end
from rlsdk.rewards.grading.protocol import RESULTS, ForeignRecordError, Record, Tag
from rlsdk.rewards.grading.sources import KnownSources
from rlsdk.rewards.grading.submission import Submission, Task
from rlsdk.rewards.scores.definitions import FailureKind, RewardDef
from rlsdk.system.printable import encodable

_POLL_S = 0.1
"""Maximum time between checks of the processes: one may die while its child holds the pipe open."""
_PAUSE_S = 0.002
"""Maximum time that a record waits to be read together with others."""
_SHORTEST_PAUSE_S = 0.0002


class Dispatcher:
    """Grades submissions in its own thread; submissions take turns, one task each. All methods are thread-safe."""

    def __init__(
        self, rewards: Sequence[RewardDef], limits: RewardLimits, log_path: Path | None, num_workers: int
    ) -> None:
        """Starts the thread and the processes, and returns at once."""
        self.ready: Future[dict[str, Any]] = Future()
        """The report of the first process when the functions are loaded; `ConfigError` if they cannot be loaded."""
        self._rewards, self._limits, self._log_path, self._num_workers = rewards, limits, log_path, num_workers
        self._lock = threading.Lock()
        self._inbox: list[Submission] = []
        self._closing = False
        self._active: deque[Submission] = deque()
        self._processes: list[GradingProcess] = []
        self._seconds_per_item = 0.001
        """Running mean of the seconds per item, over all rewards."""
        self._has_reported = False
        self._sources = KnownSources()
        self._unsaid: list[str] = []
        """What the next result says."""
        self._starts = 1
        """Number of times that the functions were loaded: once, and again when a process was killed while loading."""
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        self._selector.register(self._wake_in, selectors.EVENT_READ, None)
        _rotate(log_path)
        self._start_missing_processes()
        self._thread = threading.Thread(target=self._run, name="rlsdk-rewards", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the grading processes."""
        return [process.pid for process in self._processes]

    @property
    def is_closed(self) -> bool:
        """Whether it accepts no more submissions."""
        return self._closing

    def submit(self, submission: Submission) -> None:
        """Grades a submission; its future gets the result. Cancelling the future frees its processes."""
        submission.future.add_done_callback(self._on_done)
        with self._lock:
            if self._closing:
                submission.future.cancel()
            else:
                self._inbox.append(submission)
        self._wake()

    def close(self) -> None:
        """Cancels ungraded submissions, and ends the processes. Safe to call twice."""
        with self._lock:
            self._closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _on_done(self, future: Future[Any]) -> None:
        if future.cancelled():
            self._wake()

    def _wake(self) -> None:
        with self._lock, suppress(OSError):  # the thread is already awake, or has ended
            os.write(self._wake_out, b".")

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while not self._closing:
                self._take_inbox()
                self._assign_tasks()
                for key, _ in self._selector.select(self._wait_s()):
                    self._listen(key.data) if key.data is not None else self._drain()
                self._check_processes()
                self._check_submissions()
                if pause_s := self._pause_s():
                    time.sleep(pause_s)
        except BaseException as unexpected:  # callers wait on futures, and must get the error
            error = unexpected
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Completes every future, so that no caller waits forever: each is cancelled, or gets the error."""
        with self._lock:
            self._closing = True
            left = [*self._active, *self._inbox]
        for process in self._processes:
            process.close()
        futures: list[Future[Any]] = [self.ready, *(submission.future for submission in left)]
        for future in futures:
            with suppress(InvalidStateError):
                future.cancel() if error is None else future.set_exception(error)
        self._selector.close()
        with self._lock:
            os.close(self._wake_in)
            os.close(self._wake_out)
            self._wake_in = self._wake_out = -1

    def _take_inbox(self) -> None:
        with self._lock:
            new, self._inbox = self._inbox, []
        if new:
            self._active.extend(new)
            self._start_missing_processes()
        if self.ready.done() and not self.ready.cancelled():
            known = self.ready.result()
            for submission in [s for s in self._active if not s.is_queued]:
                submission.enqueue(known["batched"], known["reads_tokens"])
                self._report_missing_confinement(submission)
                if not submission.left:
                    self._finish(submission)

    def _report_missing_confinement(self, submission: Submission) -> None:
        """Reports missing confinement once, with the first result."""
        missing = [] if self._has_reported else self.ready.result()["missing"]
        self._has_reported = True
        if missing:
            submission.notices.append(f"graders run with less protection on this system, without: {'; '.join(missing)}")

    def _assign_tasks(self) -> None:
        """Assigns a task of each submission in turn, so that a small one does not wait for a large one."""
        for process in list(self._processes):
            if not process.idle:
                continue
            task = self._next_task()
            if task is None:
                return
            if process.is_gone():  # it died between two tasks, so no item caused it
                task.submission.queue.appendleft(task)
                self._replace(process, blame=False)
                continue
            now = time.monotonic()
            task.submission.deadline = min(task.submission.deadline, now + self._limits.batch_timeout_s)
            try:
                process.send(task)
            except OSError:  # it died before it read the task, so no item caused it
                self._replace(process, blame=True)

    def _next_task(self) -> Task | None:
        for _ in range(len(self._active)):
            submission = self._active[0]
            self._active.rotate(-1)
            if submission.queue and not submission.future.cancelled():
                return submission.next_task(self._num_workers, max(self._seconds_per_item, 1e-6))
        return None

    def _wait_s(self) -> float | None:
        """Seconds until the next check is due; None: wait for a call or a record."""
        if not self._active and self.ready.done():
            return None
        return _POLL_S

    def _pause_s(self) -> float:
        """Seconds to wait for further records; shorter than the expected rest of a task, 0 if waiting does not pay off.

        Processes write each record immediately; without the pause, fast functions would wake this thread for every one.
        """
        tasks = [process.task for process in self._processes if process.task is not None]
        if not tasks or self._inbox or self._seconds_per_item >= _PAUSE_S:
            return 0.0
        left = min(len(task.items) - task.graded for task in tasks)
        pause_s = min(_PAUSE_S, 0.7 * left * self._seconds_per_item)
        return pause_s if pause_s >= _SHORTEST_PAUSE_S else 0.0

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_in, 1 << 16)

    def _listen(self, process: GradingProcess) -> None:
        if process not in self._processes:  # just replaced
            return
        task = process.task
        before = 0 if task is None else task.graded
        try:
            for record in process.read():
                self._take(process, task, record)
        except EOFError:
            self._lose(process, FailureKind.CRASH)
        except ForeignRecordError as error:
            process.kill()
            self._lose(process, FailureKind.CRASH, f"the grading process was ended: {error}")
        if task is not None and task.graded > before:
            now = time.monotonic()
            spent = (now - process.began) / (task.graded - before)
            self._seconds_per_item += 0.3 * (spent - self._seconds_per_item)
            process.began = now

    def _take(self, process: GradingProcess, task: Task | None, record: Record) -> None:
        if record.tag is Tag.READY and process.ready is not None:
            if (text := self._sources.compare(process.ready.get("sources"))) is not None:
                self._unsaid.append(text)
            if not self.ready.done():
                self.ready.set_result(process.ready)
        elif record.tag is Tag.REFUSED and record.body is not None:
            self._refuse(str(record.body["message"]))
        elif task is not None and record.tag is Tag.SINGLY:
            self._note_singly(task, str((record.body or {}).get("message", "")))
        elif task is not None and record.tag in RESULTS:
            submission = task.submission
            submission.book(task.items[record.item], record)
            if not submission.left:
                self._finish(submission)

    def _finish(self, submission: Submission) -> None:
        with suppress(ValueError):
            self._active.remove(submission)
        submission.notices.extend(self._unsaid)
        self._unsaid.clear()
        with suppress(InvalidStateError):  # cancelled in the meantime
            submission.future.set_result(submission.result())

    def _check_processes(self) -> None:
        now = time.monotonic()
        for process in list(self._processes):
            if process.task is not None and process.task.submission.future.cancelled():
                self._drop(process)
            elif process.idle:
                continue
            elif process.is_gone():
                self._lose(process, FailureKind.CRASH)
            elif process.is_stopped():
                self._lose(process, FailureKind.CRASH, "the process was stopped by a signal", outside=True)
            elif now > process.deadline:
                self._lose(process, FailureKind.TIMEOUT)

    def _check_submissions(self) -> None:
        now = time.monotonic()
        for submission in list(self._active):
            if submission.future.cancelled():
                self._active.remove(submission)
            elif now > submission.deadline:
                limit = self._limits.batch_timeout_s
                self._give_up(submission, FailureKind.TIMEOUT, f"the batch took more than {limit} s")
            elif submission.losses_in_a_row > self._limits.max_losses_in_a_row:
                lost = submission.losses_in_a_row
                self._give_up(submission, FailureKind.CRASH, f"not graded: {lost} grading processes in a row were lost")

    def _lose(self, process: GradingProcess, kind: FailureKind, how: str = "", *, outside: bool = False) -> None:
        """Ends a process, fails or repeats the item that it was grading, and replaces the process."""
        code = process.kill() if kind is FailureKind.TIMEOUT or how else process.end()
        self._read_rest(process)
        if process.ready is None and not self.ready.done():
            killed = kind is FailureKind.CRASH and not how and came_from_outside(code)
            if killed and self._starts < self._limits.max_attempts:
                self._starts += 1
                self._drop(process)
                return self._start_missing_processes()
            slow = f"{self._targets()} took more than {self._limits.start_timeout_s} s to load"
            ended = f"the grading process ended while it loaded {self._targets()}: {describe_end(code)}"
            return self._refuse(slow if kind is FailureKind.TIMEOUT else ended)
        task, again = process.task, False
        if task is not None and task.rest and not process.retired:
            outside = outside or (kind is FailureKind.CRASH and not how and came_from_outside(code))
            again = outside and task.attempts < self._limits.max_attempts
            self._retry_or_fail(task, kind, how or f"the process died: {describe_end(code)}", again=again)
        self._replace(process, blame=not again and (task is not None or process.ready is None))
        return None

    def _read_rest(self, process: GradingProcess) -> None:
        """Reads what the process wrote before it ended, so that graded items are not lost."""
        task = process.task
        with suppress(EOFError, ForeignRecordError):
            for record in process.read():
                self._take(process, task, record)

    def _retry_or_fail(self, task: Task, kind: FailureKind, ended: str, *, again: bool) -> None:
        """Decides whether the item of a lost process fails or is graded again."""
        submission = task.submission
        reward, sample = task.rest[0]
        if again:
            task.attempts += 1
            whom = "a batch" if task.together else f"sample {sample}"
            name = self._rewards[reward].name
            submission.notices.append(f"{whom} is graded again with {name!r} (attempt {task.attempts}): {ended}")
        elif task.together:
            task.together = False
            limit = f"it took more than {self._limits.batched_timeout_s} s"
            self._note_singly(task, limit if kind is FailureKind.TIMEOUT else ended)
        else:
            limit = f"took more than {self._limits.timeout_s} s"
            task.graded += 1
            task.attempts = 1
            submission.fail((reward, sample), kind, limit if kind is FailureKind.TIMEOUT else ended)
            if not submission.left:
                self._finish(submission)

    def _note_singly(self, task: Task, why: str) -> None:
        """Notes that the samples of a batch are graded one by one, because the call for all of them failed."""
        name, count = self._rewards[task.items[0][0]].name, len(task.items)
        task.submission.notices.append(f"a batch of {count} is graded one by one with {name!r}: {encodable(why)}")

    def _replace(self, process: GradingProcess, *, blame: bool) -> None:
        """Queues the remaining items of a lost process first, and starts a replacement immediately.

        Args:
            blame: count the loss for the submission that it was grading, or for those that wait for its start.
        """
        task = process.task
        if blame:
            for submission in [task.submission] if task is not None else list(self._active):
                submission.losses_in_a_row += 1
        if task is not None and task.rest:
            task.submission.queue.appendleft(
                Task(task.submission, task.rest, together=task.together, attempts=task.attempts)
            )
        self._drop(process)

    def _drop(self, process: GradingProcess) -> None:
        """Ends a process, even if it is busy, and starts a replacement if one is needed."""
        self._selector.unregister(process.fileno())
        process.close()
        self._processes.remove(process)
        if self._active or process.ready is not None:  # else it cannot start, and no caller waits for it
            self._start_missing_processes()

    def _give_up(self, submission: Submission, kind: FailureKind, message: str) -> None:
        """Fails everything that is not graded yet, and replaces the processes that are grading it."""
        busy = [process for process in self._processes if process.task and process.task.submission is submission]
        tasks = [process.task for process in busy if process.task] + list(submission.queue)
        for process in busy:
            self._drop(process)
        for item in [item for task in tasks for item in task.rest]:
            submission.fail(item, kind, message)
        submission.queue.clear()
        self._finish(submission)

    def _refuse(self, message: str) -> None:
        """Handles functions that cannot be loaded: every submission gets the error, and the dispatcher ends."""
        error = ConfigError(message)
        if not self.ready.done():
            self.ready.set_exception(error)
        with self._lock:
            self._closing = True
            left, self._inbox = [*self._active, *self._inbox], []
        self._active.clear()
        for submission in left:
            with suppress(InvalidStateError):
                submission.future.set_exception(error)

    def _start_missing_processes(self) -> None:
        while len(self._processes) < self._num_workers:
            process = GradingProcess(self._rewards, self._limits, self._log_path)
            self._processes.append(process)
            self._selector.register(process.fileno(), selectors.EVENT_READ, process)

    def _targets(self) -> str:
        return ", ".join(repr(reward.target) for reward in self._rewards)


def _rotate(log_path: Path | None) -> None:
    """Rotates the log, keeping one earlier file: processes stop writing at `RewardLimits.log_mb`."""
    if log_path is not None and log_path.exists() and log_path.stat().st_size > _ROTATE_BYTES:
        log_path.replace(log_path.with_name(f"{log_path.name}.1"))


_ROTATE_BYTES = 1 << 20
