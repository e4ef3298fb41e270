"""The loop: steps of a stage, measured, saved and resumed. One for every kind of training."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.interfaces import Capability, RlsdkError
from rlsdk.kit.atomic import atomic_write_text
from rlsdk.trainer.checkpoint import CheckpointStore, read_state
from rlsdk.trainer.reference import reference_state
from rlsdk.trainer.stage import MODEL_FOLDER, OutputError, Stage

if TYPE_CHECKING:
    from rlsdk.trainer.session import Session


@contextmanager
def _heap_at_rest() -> Iterator[None]:
    """What is there before the first step (data, modules) stays until the last: the garbage collector, which the
    samples of every step set off, need not look through it each time."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def export_policy(session: Session, tokenizer: Any, folder: Path, *, timeout_s: float | None = None) -> None:
    """Writes the actor's weights, configuration and tokenizer in Hugging Face form into a new folder."""
    folder.mkdir(parents=True)
    with session.turns.using(session.actor.name):
        session.actor.run("save_pretrained", str(folder), timeout_s=timeout_s)
    tokenizer.save_pretrained(str(folder))


class Trainer:
    """Runs one stage to its end. Lives in the controller process, which owns no device."""

    def __init__(
        self,
        stage: Stage,
        session: Session,
        *,
        tokenizer: Any,
        config_text: str,
        keep_checkpoints: int,
        save_timeout_s: float | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Starts nothing.

        Args:
            stage: what a step is.
            session: whose trained roles are saved, each in a folder of its name.
            tokenizer: goes beside the exported model.
            config_text: goes into every checkpoint.
            keep_checkpoints: newest ones that are kept.
            save_timeout_s: deadline of each role's part of a checkpoint; None: that of its group.
            stop: asked between steps; True saves and returns.
        """
        self.stage = stage
        self.session = session
        self.output = stage.output
        self.tokenizer = tokenizer
        self.config_text = config_text
        self.save_timeout_s = save_timeout_s
        self.stop = stop
        self.last_checkpoint: Path | None = None
        self.store = CheckpointStore(stage.output.run_dir / stage.settings.folder, keep_checkpoints)

    def fit(self) -> None:
        """Steps until the stage is over or a stop is requested, which is saved.

        Raises:
            Exception: what a callback raised, after a save.
            OutputError: figures cannot be written; a save was tried.
        """
        with _heap_at_rest():
            self._fit()

    def _fit(self) -> None:
        settings = self.stage.settings
        self.stage.begin()
        while self.stage.step < settings.steps and not self.stop():
            try:
                metrics = self.stage.advance()
                last = self.stage.step == settings.steps
                self.stage.measure(last=last)
            except OutputError:
                self._rescue()
                raise
            failed = self._call_back(metrics)
            if self._is_save_due(last=last, ending=self.stop() or failed is not None):
                self.save()
            if failed is not None:
                raise failed

    def save(self) -> Path:
        """Writes a checkpoint: the state of every trained role, the model, and everything else a resume needs."""
        self.stage.settle()
        step = self.stage.step
        state = {**self.stage.state_dict(), **reference_state(self.session.reference, self.store.folder)}
        with self.output.view.phase("save"), self.store.write(step, state) as draft:
            self.session.save_roles(draft, timeout_s=self.save_timeout_s)
            if self.stage.settings.exports and self.session.actor.can(Capability.EXPORT):
                export_policy(self.session, self.tokenizer, draft / MODEL_FOLDER, timeout_s=self.save_timeout_s)
            self.stage.save_parts(draft)
            atomic_write_text(draft / "config.yaml", self.config_text)
        self.last_checkpoint = self.store.folder / f"step_{step:08d}"
        self.output.view.saved(step, self.last_checkpoint)
        return self.last_checkpoint

    def _rescue(self) -> None:
        """Saves the last whole step where that can still be done; what keeps it from that is said, not raised."""
        try:
            if self.output.run_dir.is_dir() and self.stage.settings.save_every is not None:
                self.save()
        except (RlsdkError, OSError) as error:
            self.output.view.notice(f"no checkpoint of step {self.stage.step}: {error}")

    def restore(self, checkpoint: Path) -> None:
        """Goes on from a whole checkpoint.

        Raises:
            CheckpointError: it is not whole, or of another run's data.
        """
        saved = read_state(checkpoint)
        self.session.load_roles(checkpoint, timeout_s=self.save_timeout_s)
        self.stage.load_state_dict(saved)
        self.stage.load_parts(checkpoint)
        self.last_checkpoint = checkpoint

    def _call_back(self, metrics: Any) -> Exception | None:
        """Calls every callback; the first error ends the run, after a save."""
        try:
            for callback in self.output.callbacks:
                callback(self.stage.step, metrics)
        except Exception as error:
            return error
        return None

    def _is_save_due(self, *, last: bool, ending: bool) -> bool:
        settings = self.stage.settings
        if settings.save_every is None:
            return False
        if last:
            return settings.saves_last
        return ending or self.stage.step % settings.save_every == 0
