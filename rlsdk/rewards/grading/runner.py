"""Grades batches in processes that can be killed: a failing reward function costs only its own sample."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

from rlsdk.interfaces import ConfigError, RewardSample
from rlsdk.interfaces.settings import RewardLimits
from rlsdk.rewards.grading.dispatch import Dispatcher
from rlsdk.rewards.grading.submission import Submission
from rlsdk.rewards.scores.definitions import RewardDef
from rlsdk.rewards.scores.results import RewardResult


class RewardRunner:
    """Runs reward functions in one or more processes that live as long as the runner.

    `start` returns immediately, so that imports overlap with the rest of the startup; `score` waits for them. The
    processes end on `close`, when the runner is deleted, and when this process ends for any reason.
    """

    def __init__(
        self,
        rewards: Sequence[RewardDef],
        limits: RewardLimits | None = None,
        *,
        num_workers: int = 1,
        log_path: Path | None = None,
        is_whole: bool = True,
    ) -> None:
        """Does not start processes yet.

        Args:
            rewards: at least one, with different names.
            limits: limits on time and memory.
            num_workers: number of processes. More than one helps if grading takes longer than sampling.
            log_path: file to which the output of the functions is appended; None: output is discarded.
            is_whole: these are all rewards of the samples, so a sample to which none applies counts as failed. False:
                the caller merges other rewards (`merge`), and then calls `name_inapplicable`.

        Raises:
            ConfigError: there is no reward, two have the same name, or `num_workers` is below 1.
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
        self.is_whole = is_whole
        self._lock = threading.Lock()
        self._holder: list[Dispatcher] = []
        self._finalizer = weakref.finalize(self, _close_all, self._holder)

    @property
    def confinement(self) -> Mapping[str, Any]:
        """Confinement of the grading processes: `held` and `missing`, each a list of texts.

        Waits until they are ready; raises the same errors as `wait_ready`.
        """
        return self._dispatcher().ready.result()

    @property
    def pids(self) -> list[int]:
        """Process ids of the running grading processes."""
        return [pid for dispatcher in self._holder for pid in dispatcher.pids]

    def start(self) -> None:
        """Starts missing processes; returns immediately."""
        self._dispatcher()

    def wait_ready(self) -> None:
        """Blocks until the reward functions are loaded.

        Raises:
            ConfigError: a function cannot be loaded, or the process ended or hung while loading it.
        """
        self._dispatcher().ready.result()

    def submit(self, samples: Sequence[RewardSample]) -> Future[RewardResult]:
        """Grades all samples with all rewards, and returns immediately. Thread-safe; may be called many times.

        Submissions take turns on the grading processes. The values of a sample do not depend on other submissions; a
        batched reward gets only samples of one submission. A submission ends within `limits.batch_timeout_s` after its
        first task is assigned. Failures of reward functions are in the result and raise nothing.

        Raises:
            DataError: a row contains types other than those of JSON.

        The future raises `ConfigError` if a function cannot be loaded (see `wait_ready`); `close` cancels it.
        Cancelling it frees the processes that work on it.
        """
        submission = Submission(self.rewards, samples, self.limits, is_whole=self.is_whole)
        self._dispatcher().submit(submission)
        return submission.future

    def score(self, samples: Sequence[RewardSample]) -> RewardResult:
        """Calls `submit`, and waits for the result.

        Raises:
            ConfigError: on the first call, see `wait_ready`.
            DataError: a row contains types other than those of JSON.
        """
        future = self.submit(samples)
        try:
            return future.result()
        except BaseException:  # Ctrl-C: the rest is not needed
            future.cancel()
            raise

    def close(self) -> None:
        """Ends the processes, and cancels ungraded submissions. Safe to call twice; `submit` restarts them."""
        with self._lock:
            _close_all(self._holder)

    def __enter__(self) -> RewardRunner:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _dispatcher(self) -> Dispatcher:
        with self._lock:
            if self._holder and self._holder[0].is_closed:
                _close_all(self._holder)
            if not self._holder:
                self._holder.append(Dispatcher(self.rewards, self.limits, self.log_path, self.num_workers))
            return self._holder[0]


def _close_all(dispatchers: list[Dispatcher]) -> None:
    for dispatcher in dispatchers:
        dispatcher.close()
    dispatchers.clear()
