"""A stage defines what the steps of a run do. `Trainer` has the loop, checkpoints and resume for every stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsdk.trainer.stages.evaluation.schedule import Evaluations
from rlsdk.trainer.tracking.run_output import RunOutput


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """Length of a stage, and what it saves."""

    steps: int
    """Number of steps of the whole stage, including those before a resume."""
    save_every: int | None
    """Steps between checkpoints; None: no checkpoints."""
    saves_last: bool
    """Whether to save after the last step. A requested stop always saves."""
    folder: str
    """Name of its checkpoint folder in the run's folder."""
    exports: bool
    """Whether checkpoints contain the model in Hugging Face format, too."""
    export_every: int | None = None
    """Interval of steps whose checkpoints contain the model, in addition to the last and the best one; None: all do."""


class Stage(ABC):
    """Steps of one kind: reinforcement learning, supervised training, a reward model, preferences."""

    settings: StageSettings
    output: RunOutput
    """Destinations of its metrics; a warm start has no step callbacks."""
    evaluations: Evaluations
    """Evaluations of its weights on held-out data."""
    step: int = 0
    """Number of steps done."""

    def begin(self) -> None:  # noqa: B027 - a working default
        """Called before the first step of this process, resumed or not."""

    @abstractmethod
    def advance(self) -> Mapping[str, float]:
        """Runs one step: reports it, adds one to `step`, and returns its metrics."""

    def measure(self, *, last: bool) -> None:
        """Called after a step and before its save: runs evaluations that are due."""
        self.evaluations.after(self.step, last=last)

    def preempt(self) -> None:  # noqa: B027 - a working default
        """Called when the machine is preempted: makes `advance` raise a `PreemptedError` instead of waiting.
        Safe in a signal handler."""

    def halt(self) -> bool:
        """Stops background work for good. False if a checkpoint saved now could not be resumed exactly."""
        return True

    def settle(self) -> None:  # noqa: B027 - a working default
        """Called before a checkpoint: waits for all that an exact resume needs."""

    def saving(self, step: int) -> None:  # noqa: B027 - a working default
        """Called when a checkpoint of this step begins: later records belong after it."""

    def saved(self, step: int, oldest: int) -> None:  # noqa: B027 - a working default
        """Called when a checkpoint of this step is complete; the oldest kept checkpoint is of step `oldest`."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """State for a resume in addition to that of the engines: JSON types."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`, including `step`.

        Raises:
            CheckpointError: the state is of other data, or of another version of rlsdk.
        """

    def save_parts(self, checkpoint: Path) -> None:  # noqa: B027 - a working default
        """Writes state that is too large for `state_dict` into a checkpoint; roles and model are already there."""

    def begin_save_parts(self, checkpoint: Path) -> Callable[[], None]:
        """As `save_parts`, for the current state, while the stage continues: later calls of roles run after it. Returns
        a function that waits for it, to be called on another thread when the model is written."""
        return lambda: None

    def load_parts(self, checkpoint: Path) -> None:  # noqa: B027 - a working default
        """Loads what `save_parts` wrote; roles and state are already loaded."""

    def close(self) -> None:  # noqa: B027 - a working default
        """Closes what the stage started."""
