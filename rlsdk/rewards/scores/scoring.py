"""Interface of scorers, and a scorer that combines several."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Protocol

from rlsdk.interfaces import RewardSample
from rlsdk.rewards.scores.results import RewardResult, merge, name_inapplicable


class Scorer(Protocol):
    """Scores samples: in other processes, with a service, or with a model."""

    def wait_ready(self) -> None:
        """Waits until its rewards are loaded.

        Raises:
            ConfigError: a reward cannot be loaded.
        """
        ...

    def submit(self, samples: Sequence[RewardSample]) -> Future[RewardResult]:
        """Starts scoring samples, and returns immediately.

        Failures of rewards are in the result. The future raises errors that end the run. Cancelling it frees the
        processes that work on it.
        """
        ...

    def close(self) -> None:
        """Ends its processes, and cancels ungraded submissions. Safe to call twice."""
        ...


class CombinedScorer:
    """Combines scorers that compute different rewards of the same samples."""

    def __init__(self, parts: Sequence[Scorer], names: Sequence[str], *, scored_elsewhere: bool = False) -> None:
        """
        Args:
            parts: scorers, each with its own rewards and with `is_whole` False (`RewardRunner`).
            names: names of all rewards, in the order of the result.
            scored_elsewhere: samples also get a score from elsewhere (a reward model), so a sample to which no reward
                applies does not count as failed.
        """
        self._parts = parts
        self._names = names
        self._scored_elsewhere = scored_elsewhere

    def wait_ready(self) -> None:
        """See `Scorer.wait_ready`."""
        for part in self._parts:
            part.wait_ready()

    def submit(self, samples: Sequence[RewardSample]) -> Future[RewardResult]:
        """See `Scorer.submit`."""
        whole: Future[RewardResult] = Future()
        waiting = [part.submit(samples) for part in self._parts]
        left, lock = len(waiting), threading.Lock()

        def done(_: Future[RewardResult]) -> None:
            nonlocal left
            with lock:
                left -= 1
                if left:
                    return
            with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
                try:
                    result = merge([part.result() for part in waiting], self._names)
                    whole.set_result(name_inapplicable(result, scored_elsewhere=self._scored_elsewhere))
                except BaseException as error:
                    whole.set_exception(error)

        whole.add_done_callback(lambda future: [part.cancel() for part in waiting] if future.cancelled() else None)
        for part in waiting:
            part.add_done_callback(done)
        return whole

    def close(self) -> None:
        """See `Scorer.close`."""
        for part in self._parts:
            part.close()
