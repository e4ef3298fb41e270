"""Destinations of a run's metrics and samples: its folder, its view, trackers and step callbacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsdk.interfaces import RlsdkError, StepCallback, Tracker
from rlsdk.kit.files.write_errors import AGAIN, OutputError, writing
from rlsdk.trainer.checkpoints.run_folder import eval_folder
from rlsdk.trainer.tracking.events import RunView
from rlsdk.trainer.tracking.machine import begin, machine_metrics
from rlsdk.trainer.tracking.samples import write_eval_samples


@dataclass(frozen=True, kw_only=True)
class RunOutput:
    """Destinations of a run's metrics."""

    run_dir: Path
    view: RunView
    trackers: Sequence[Tracker] = ()
    callbacks: Sequence[StepCallback] = ()

    def __post_init__(self) -> None:
        begin()

    def track(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """Logs to every tracker, with how busy the machine is.

        Raises:
            OutputError: the run's folder is gone, or a tracker cannot write.
        """
        if not self.run_dir.is_dir():
            raise OutputError(
                f"the run's folder {str(self.run_dir)!r} is gone (deleted, renamed, or its disk unmounted), and with "
                f"it the figures of step {step} and every checkpoint"
            )
        metrics = {**metrics, **machine_metrics(metrics)}
        for tracker in self.trackers:
            with writing(f"the figures of step {step}", self.run_dir), _tracking(tracker, step):
                tracker.log(step, metrics)
                if samples:
                    tracker.log_samples(step, samples)

    def save_samples(self, step: int, samples: Mapping[str, Sequence[Mapping[str, Any]]], *, compress: bool) -> None:
        """Writes every sample of an evaluation, by set.

        Raises:
            OutputError: they cannot be written.
        """
        with writing(f"the evaluation's samples of step {step}", self.run_dir):
            write_eval_samples(eval_folder(self.run_dir, step), step, samples, compress=compress)

    def close(self) -> None:
        for tracker in self.trackers:
            with suppress(OSError):  # failed writes were already reported
                tracker.close()


@contextmanager
def _tracking(tracker: Tracker, step: int) -> Iterator[None]:
    """Names the tracker that failed: a server that refuses, a library's own error."""
    try:
        yield
    except (OSError, RlsdkError):
        raise
    except Exception as error:
        raise OutputError(
            f"{type(tracker).__name__} cannot log step {step}: {type(error).__name__}: {error}. Repair its cause, or "
            f"leave it out of tracking.trackers, {AGAIN}"
        ) from error
