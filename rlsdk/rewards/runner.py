"""Grades batches in killable processes: whatever a reward function does, it costs its own sample and no more."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rlsdk.interfaces import ConfigError, RewardSample
from rlsdk.rewards.definitions import RewardDef, RewardLimits, RewardResult
from rlsdk.rewards.grading import Grading, cut_tasks, wait_for
from rlsdk.rewards.process import GradingProcess
from rlsdk.rewards.protocol import Tag


class RewardRunner:
    """Reward functions, in one or more processes that live as long as the runner.

    `start` returns at once, so that imports overlap with the rest of the run's start; `score` waits for them. The
    processes end with `close`, with the runner, and with this process, however it ends.
    """

    def __init__(
        self,
        rewards: Sequence[RewardDef],
        limits: RewardLimits | None = None,
        *,
        num_workers: int = 1,
        log_path: Path | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            rewards: at least one; names differ.
            limits: on time and memory.
            num_workers: processes. More than one pays when grading takes longer than sampling.
            log_path: a file to which what the functions print is added; None: dropped.

        Raises:
            ConfigError: no reward, or two of one name.
        """
        names = [reward.name for reward in rewards]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"rewards: expected at least one, each with its own name; got {names}")
        if num_workers < 1:
            raise ConfigError(f"rewards: num_workers is {num_workers}; expected at least 1")
        self.rewards = tuple(rewards)
        self.limits = limits or RewardLimits()
        self.log_path = log_path
        self.num_workers = num_workers
        self._processes: list[GradingProcess] = []
        self._batched: Sequence[bool] | None = None
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _close_all, self._processes)

    def start(self) -> None:
        """Starts the processes that are not there yet, and returns at once."""
        while len(self._processes) < self.num_workers:
            self._processes.append(self._start_one())

    def wait_ready(self) -> None:
        """Blocks until the reward functions are loaded.

        Raises:
            ConfigError: one cannot be loaded, or the process ended or hung meanwhile.
        """
        with self._lock:
            self._wait_ready()

    def score(self, samples: Sequence[RewardSample]) -> RewardResult:
        """Grades all samples with all rewards. Never raises for what a reward function does, and never hangs: it ends
        within `limits.batch_timeout_s`, start-up not counted.

        Raises:
            ConfigError: at the first call: see `wait_ready`.
            DataError: a row holds more than JSON types.
        """
        with self._lock:
            batched = self._wait_ready()
            grading = Grading(self._processes, self._start_one, self.rewards, self.limits, samples)
            try:
                grading.run(cut_tasks(len(samples), batched, self.num_workers))
            except BaseException:  # Ctrl-C, or a row that cannot be sent: no process may keep half a batch
                _close_all(self._processes)
                raise
            return grading.result()

    def close(self) -> None:
        """Ends the processes. Safe to call twice; `score` starts them again."""
        with self._lock:
            _close_all(self._processes)

    def __enter__(self) -> RewardRunner:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_one(self) -> GradingProcess:
        return GradingProcess(self.rewards, self.limits, self.log_path)

    def _wait_ready(self) -> Sequence[bool]:
        """Starts what is not running, and returns which rewards are batched: known from the first process on."""
        self.start()
        if self._batched is None:
            self._batched = self._await_first(self._processes[0])
        return self._batched

    def _await_first(self, process: GradingProcess) -> Sequence[bool]:
        refusal: str | None = None
        while process.batched is None and refusal is None:
            wait_for([process], process.deadline)
            try:
                refusal = next((r.body["message"] for r in process.read() if r.tag is Tag.REFUSED and r.body), None)
            except EOFError:
                refusal = f"the grading process ended while it loaded {self._targets()}: {process.kill()}"
            if time.monotonic() > process.deadline:
                refusal = f"{self._targets()} took more than {self.limits.start_timeout_s} s to load"
        if process.batched is None:
            _close_all(self._processes)
            raise ConfigError(refusal)
        return process.batched

    def _targets(self) -> str:
        return ", ".join(repr(reward.target) for reward in self.rewards)


def _close_all(processes: list[GradingProcess]) -> None:
    for process in processes:
        process.close()
    processes.clear()
