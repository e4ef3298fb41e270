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
from rlsdk.rewards.definitions import RewardDef, RewardLimits
from rlsdk.rewards.dispatch import Dispatcher
from rlsdk.rewards.results import RewardResult
from rlsdk.rewards.submission import Submission


class RewardRunner:
    """Reward functions, in one or more processes that live as long as the runner.

    `start` returns immediately, so that imports overlap with the rest of the run's start; `score` waits for them. The
    processes end with `close`, with the runner, and with this process, however it ends.
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
        """Starts nothing yet.

        Args:
            rewards: at least one; names differ.
            limits: on time and memory.
            num_workers: number of processes. More than one helps if grading takes longer than sampling.
            log_path: a file to which what the functions print is added; None: dropped.
            is_whole: these are all rewards of the samples, so that a sample to which none applies has failed. False:
                the caller adds others (`merge`) and then decides (`name_inapplicable`).

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
        self.is_whole = is_whole
        self._lock = threading.Lock()
        self._holder: list[Dispatcher] = []
        self._finalizer = weakref.finalize(self, _close_all, self._holder)

    @property
    def confinement(self) -> Mapping[str, Any]:
        """Confinement of the grading processes: `held` and `missing`, each a list of texts. Waits until they are ready;
        raises as `wait_ready`."""
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
            ConfigError: a function cannot be loaded, or the process ended or hung meanwhile.
        """
        self._dispatcher().ready.result()

    def submit(self, samples: Sequence[RewardSample]) -> Future[RewardResult]:
        """Has all samples graded with all rewards, and returns at once. May be called from any thread, many times.

        All submissions share the grading processes, in turns. A sample's values do not depend on what else was
        submitted, and with it or apart; a batched reward gets what was submitted together. A submission ends within
        `limits.batch_timeout_s` after its first task was handed out, and what a reward function does raises nothing.

        Raises:
            DataError: a row holds more than JSON types.

        The future raises `ConfigError` where a function cannot be loaded (see `wait_ready`), and is cancelled by
        `close`. Cancelling it frees the processes that are at it.
        """
        submission = Submission(self.rewards, samples, self.limits, is_whole=self.is_whole)
        self._dispatcher().submit(submission)
        return submission.future

    def score(self, samples: Sequence[RewardSample]) -> RewardResult:
        """`submit`, and waits for the result.

        Raises:
            ConfigError: at the first call: see `wait_ready`.
            DataError: a row holds more than JSON types.
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
