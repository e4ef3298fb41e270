"""One batch on its way through the grading processes: what is lost, and whose fault it was."""

from __future__ import annotations

import selectors
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np

from rlsdk.interfaces import RewardSample
from rlsdk.rewards.definitions import FailureExample, FailureKind, RewardDef, RewardLimits, RewardResult
from rlsdk.rewards.process import GradingProcess, Task
from rlsdk.rewards.protocol import Record, Tag

EXAMPLES_PER_KIND = 3
"""Of each kind of failure and reward, that a result shows."""
_POLL_S = 0.1
"""Longest wait without a look at the processes: one may die while a child of its own holds the pipe open."""


class Grading:
    """One `score` call: hands tasks to idle processes, books their records, replaces the processes that are lost."""

    def __init__(
        self,
        processes: list[GradingProcess],
        start_one: Callable[[], GradingProcess],
        rewards: Sequence[RewardDef],
        limits: RewardLimits,
        samples: Sequence[RewardSample],
    ) -> None:
        """`processes` is changed in place: lost ones are replaced by what `start_one` gives."""
        self.processes = processes
        self.start_one = start_one
        self.rewards = rewards
        self.limits = limits
        self.samples = samples
        self.queue: deque[Task] = deque()
        self.values = np.zeros((len(self.rewards), len(samples)))
        self.graded = np.zeros((len(self.rewards), len(samples)), dtype=np.bool_)
        self.failures: Counter[str] = Counter()
        self.examples: list[FailureExample] = []
        self.shown: Counter[tuple[FailureKind, int]] = Counter()
        self.losses_in_a_row = 0

    def run(self, tasks: Sequence[Task]) -> None:
        """Grades until every item has its value or its failure."""
        self.queue.extend(tasks)
        end = time.monotonic() + self.limits.batch_timeout_s
        for process in [p for p in self.processes if p.is_gone()]:  # died between two batches: nobody's fault
            self._replace(process)
        while self.queue or any(process.task for process in self.processes):
            if time.monotonic() > end:
                return self._give_up(FailureKind.TIMEOUT, f"the batch took more than {self.limits.batch_timeout_s} s")
            if self.losses_in_a_row > self.limits.max_losses_in_a_row:
                return self._give_up(
                    FailureKind.CRASH, f"not graded: {self.losses_in_a_row} grading processes in a row were lost"
                )
            self._hand_out()
            deadline = min([end, *(process.deadline for process in self.processes if not process.idle)])
            for process in wait_for(self.processes, deadline):
                if not self._listen(process):
                    self._lose(process, FailureKind.CRASH)
            self._check_deadlines()

    def result(self) -> RewardResult:
        """The sums."""
        weights = np.array([reward.weight for reward in self.rewards])
        valid = self.graded[weights != 0].all(axis=0)
        scores = np.where(valid, weights @ self.values, 0.0)
        names = [reward.name for reward in self.rewards]
        return RewardResult(
            scores=scores.astype(np.float32),
            valid=valid,
            by_reward=dict(zip(names, self.values.astype(np.float32), strict=True)),
            graded=dict(zip(names, self.graded, strict=True)),
            failures=self.failures,
            examples=tuple(self.examples),
        )

    def _hand_out(self) -> None:
        for process in list(self.processes):
            if process.idle and self.queue:
                try:
                    process.send(self.queue.popleft(), self.samples)
                except OSError:  # it died before it read anything: no item did that
                    self._replace(process)

    def _listen(self, process: GradingProcess) -> bool:
        """Books what a process says; False when it will say no more."""
        task = process.task
        try:
            for record in process.read():
                if task is not None and record.tag in (Tag.VALUE, Tag.FAILED):
                    self._book(task.items[task.graded - 1], record)
        except EOFError:
            return False
        return True

    def _book(self, item: tuple[int, int], record: Record) -> None:
        if record.tag is Tag.VALUE:
            self.values[item] = record.value
            self.graded[item] = True
            self.losses_in_a_row = 0
        elif record.body is not None:
            self._fail(item, FailureKind(record.body["kind"]), record.body["message"])

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for process in list(self.processes):
            if process.is_gone():
                self._lose(process, FailureKind.CRASH)
            elif not process.idle and now > process.deadline:
                self._lose(process, FailureKind.TIMEOUT)

    def _lose(self, process: GradingProcess, kind: FailureKind) -> None:
        """Ends a process, books the item that it was at, and replaces it. A batched call is taken apart instead."""
        ended = process.kill()
        self._listen(process)  # what it wrote before it ended: an item that was graded is not lost
        task = process.task
        if task is not None and task.together:
            task.together = False
        elif task is not None and task.rest and not process.retired:
            limit = f"took more than {self.limits.timeout_s} s"
            self._fail(task.rest[0], kind, limit if kind is FailureKind.TIMEOUT else f"the process died: {ended}")
            task.graded += 1
        self._replace(process)

    def _replace(self, process: GradingProcess) -> None:
        """Starts another process in its place, at once; what the old one had left to do goes first."""
        self.losses_in_a_row += 1
        process.close()
        if process.task is not None and process.task.rest:
            self.queue.appendleft(Task(process.task.rest, process.task.together))
        self.processes[self.processes.index(process)] = self.start_one()

    def _give_up(self, kind: FailureKind, message: str) -> None:
        """Books everything that is not graded yet, and ends the processes that are at it."""
        left = [task for process in self.processes if (task := process.task)]
        for item in [item for task in (*left, *self.queue) for item in task.rest]:
            self._fail(item, kind, message)
        self.queue.clear()
        for process in [p for p in self.processes if not p.idle]:
            process.close()
            self.processes.remove(process)

    def _fail(self, item: tuple[int, int], kind: FailureKind, message: str) -> None:
        self.failures[kind.value] += 1
        reward, sample = item
        self.shown[kind, reward] += 1
        if self.shown[kind, reward] <= EXAMPLES_PER_KIND:
            name = self.rewards[reward].name
            self.examples.append(FailureExample(kind=kind, reward=name, sample=sample, message=message))


def cut_tasks(num_samples: int, batched: Sequence[bool], num_workers: int) -> list[Task]:
    """A task per batched reward; all other items, cut so that workers finish together."""
    tasks = [
        Task([(reward, at) for at in range(num_samples)], together=True)
        for reward, together in enumerate(batched)
        if together and num_samples
    ]
    single = [reward for reward, together in enumerate(batched) if not together]
    items = [(reward, at) for reward in single for at in range(num_samples)]
    size = len(items) if num_workers == 1 else max(1, -(-len(items) // (4 * num_workers)))
    return tasks + [Task(items[start : start + size]) for start in range(0, len(items), size or 1)]


def wait_for(processes: Sequence[GradingProcess], until: float) -> list[GradingProcess]:
    """The processes that have something to say; returns early, and empty, every so often."""
    with selectors.DefaultSelector() as selector:
        for process in processes:
            selector.register(process, selectors.EVENT_READ, process)
        wait_s = min(_POLL_S, max(0.0, until - time.monotonic()))
        return [key.data for key, _ in selector.select(wait_s)]
