"""The exponential moving average of the actor's weights: each rank averages the weights it holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlsdk.config.sections.role_kinds import ACTOR
from rlsdk.trainer.checkpoints.checkpoint import MODEL_FOLDER
from rlsdk.trainer.roles.average import export_average
from rlsdk.trainer.roles.session import Session

AVERAGE_FOLDER = "model_average"
"""Folder in a checkpoint: the average in Hugging Face format."""
PARTS_FOLDER = "actor_average"
"""Folder in a checkpoint: each rank's part of the average."""


class PolicyAverage:
    """The averaged weights of a run's policy, over all its ranks. Runs in the controller."""

    def __init__(
        self, session: Session, decay: float, *, timeout_s: float | None = None, update_timeout_s: float | None = None
    ) -> None:
        """Initializes the average to the current weights.

        Args:
            session: the session whose actor is averaged.
            decay: share of the old average that is kept at an update.
            timeout_s: for each part of a checkpoint; None: the timeout of the actor's group.
            update_timeout_s: for an update; None: the timeout of the actor's group.
        """
        self._update_timeout_s = update_timeout_s
        self._session = session
        self._decay = decay
        self._timeout_s = timeout_s
        self._start()

    def update(self) -> None:
        """Updates the average with the current weights."""
        with self._session.turns.using(ACTOR):
            self._session.actor.run("update_average", timeout_s=self._update_timeout_s)

    def save(self, checkpoint: Path) -> None:
        """Writes the average into a checkpoint; if the checkpoint has an exported model, exports the averaged model
        too."""
        self.begin_save(checkpoint)()

    def begin_save(self, checkpoint: Path) -> Callable[[], None]:
        """As `save`, without waiting: each rank writes its part before later calls, including `update`. Returns a
        function that waits for the parts and exports the averaged model; call it once the exported model exists.
        """
        parts = checkpoint / PARTS_FOLDER
        parts.mkdir()
        written = self._session.actor.submit("save_average", str(parts))

        def finish() -> None:
            written.result(self._timeout_s)
            if (checkpoint / MODEL_FOLDER).is_dir():
                export_average(parts, checkpoint / MODEL_FOLDER, checkpoint / AVERAGE_FOLDER)

        return finish

    def load(self, checkpoint: Path) -> None:
        """Restores the average from a checkpoint; starts from the loaded weights if the checkpoint has no average."""
        parts = checkpoint / PARTS_FOLDER
        if parts.is_dir():
            self._session.actor.run("load_average", str(parts), timeout_s=self._timeout_s)
        else:
            self._start()

    def _start(self) -> None:
        with self._session.turns.using(ACTOR):
            self._session.actor.run("start_average", self._decay, timeout_s=self._update_timeout_s)
