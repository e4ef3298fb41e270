"""Restarts a run whose processes died, within the same command: from its newest complete checkpoint, in a new
session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Protocol, TypeVar

from rlsdk.config import RunConfig
from rlsdk.interfaces import DeadlineError, RlsdkError, WeightSyncError, WorkerError
from rlsdk.trainer.checkpoints.checkpoint import CheckpointStore
from rlsdk.trainer.roles.serving import ReplicasLostError

if TYPE_CHECKING:
    from rlsdk.trainer.tracking.events import RunView

DEATH_S = 3.0
"""Seconds by which a process's death may be noticed later than the error that it causes."""
MAX_QUOTED = 200
"""Largest number of characters of an error that a notice quotes."""

_Result = TypeVar("_Result")


class SessionLostError(WorkerError):
    """A process that the session needs has died."""

    def __init__(self, noticed: RlsdkError) -> None:
        """`noticed`: the error that its death caused."""
        super().__init__(str(noticed))
        self.noticed = noticed


class DetectsLosses(Protocol):
    """The part of a cluster's interface that is needed here."""

    def find_lost(self, wait_s: float) -> str | None: ...


class SessionRestarts:
    """Restarts a run's session while it makes progress: each new checkpoint resets the count of restarts."""

    def __init__(self, config: RunConfig, run_dir: Path, view: RunView, stop: Callable[[], bool]) -> None:
        """Starts nothing.

        Args:
            config: the run's configuration; `faults.session_restarts` is the largest number of restarts in a row.
            run_dir: the run's folder.
            view: receives notices.
            stop: True if the run is asked to end; it is then not restarted.
        """
        self._config = config
        self._run_dir = run_dir
        self._view = view
        self._stop = stop
        self.has_begun = False
        """Whether steps have begun: a death before that is a startup failure and is reported at once."""
        self.restarts = 0
        self._in_a_row = 0
        self._mark = self._newest()

    def run(self, attempt: Callable[[RunConfig], _Result]) -> _Result:
        """Calls `attempt` until it ends without a `SessionLostError`.

        Args:
            attempt: starts the session and trains, resumed according to the given configuration.

        Raises:
            RlsdkError: the error that ended the session, if it is not restarted.
        """
        config = self._config
        while True:
            try:
                return attempt(config)
            except SessionLostError as lost:
                config = self._again(lost.noticed)

    def check(self, error: RlsdkError, cluster: DetectsLosses) -> None:
        """Raises `SessionLostError` if the session ended because a process died and may be restarted."""
        if not self.has_begun or not isinstance(error, WorkerError | WeightSyncError) or self._stop():
            return
        if isinstance(error, DeadlineError | ReplicasLostError) or cluster.find_lost(DEATH_S) is not None:
            raise SessionLostError(error) from error

    def _again(self, error: RlsdkError) -> RunConfig:
        mark, most = self._newest(), self._config.faults.session_restarts
        if mark != self._mark:
            self._mark, self._in_a_row = mark, 0
        if self._in_a_row >= most:
            if most:
                error.add_note(f"the session was started again {most} times in a row without a new checkpoint "
                               f"(faults.session_restarts {most})")  # fmt: skip
            raise error
        self._in_a_row += 1
        self.restarts += 1
        place = "its newest whole checkpoint" if any(mark) else "the beginning: there is no checkpoint yet"
        said = shorten(str(error).splitlines()[0], MAX_QUOTED)
        self._view.notice(
            f"warning: the session was lost and is started again from {place} ({self._in_a_row} of {most} in a row): "
            f"{said}"
        )
        resume = "auto" if any(mark) else self._config.trainer.resume
        trainer = self._config.trainer.model_copy(update={"resume": resume})
        return self._config.model_copy(update={"trainer": trainer})

    def _newest(self) -> tuple[int, ...]:
        """For each kind of checkpoint, the one written last."""
        folders = sorted(path for path in self._run_dir.glob("*checkpoints") if path.is_dir())
        return tuple(
            max((checkpoint.order for checkpoint in CheckpointStore(path, 1).find()), default=0) for path in folders
        )
