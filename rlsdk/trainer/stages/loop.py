"""The training loop for every kind of training: runs, evaluates, saves and resumes the steps of a stage."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.interfaces import Capability, CheckpointError, ConfigError
from rlsdk.kit.files.write_errors import OutputError
from rlsdk.system.atomic import atomic_write_text
from rlsdk.trainer.checkpoints.checkpoint import MODEL_FOLDER, BestRecord, CheckpointStore, faults, read_state
from rlsdk.trainer.checkpoints.reference import reference_state
from rlsdk.trainer.checkpoints.saving import BackgroundWork
from rlsdk.trainer.stages.evaluation.schedule import EvaluationError
from rlsdk.trainer.stages.export import card_of, complete_export, export_policy
from rlsdk.trainer.stages.stage import Stage
from rlsdk.trainer.tracking.stopping import EvaluationStoppedError, PreemptedError

if TYPE_CHECKING:
    from rlsdk.trainer.roles.session import Session


@contextmanager
def _heap_at_rest() -> Iterator[None]:
    """Excludes the objects that exist before the first step (data, modules) from garbage collection: they live until
    the last step, and collections triggered by each step's samples need not scan them."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


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
        preempted: Callable[[], bool] = lambda: False,
        in_background: bool = False,
    ) -> None:
        """Starts nothing.

        Args:
            stage: the stage to run.
            session: each of its trained roles is saved in a folder named after the role.
            tokenizer: saved with the exported model.
            config_text: configuration, saved in every checkpoint.
            keep_checkpoints: number of newest checkpoints that are kept.
            save_timeout_s: timeout of each role's part of a checkpoint; None: the timeout of its group.
            stop: polled between steps; True saves and returns.
            preempted: whether the machine is preempted; then the trainer does not wait for background work.
            in_background: write checkpoints while the run continues.
        """
        self.stage = stage
        self.session = session
        self.output = stage.output
        self.tokenizer = tokenizer
        self.config_text = config_text
        self.save_timeout_s = save_timeout_s
        self.stop = stage.evaluations.stop = stop
        self.preempted = preempted
        self.last_checkpoint: Path | None = None
        self.store = CheckpointStore(stage.output.run_dir / stage.settings.folder, keep_checkpoints)
        self.in_background = in_background and not session.trained_move
        if in_background and session.trained_move:
            self.output.view.notice(
                "checkpoint.background has no effect: trained roles take turns on their devices with others, and "
                "checkpoints are written while they have them"
            )
        self._background = BackgroundWork()
        self._saving_step = 0
        self._is_rescuing = False

    def fit(self) -> None:
        """Runs steps until the stage is over or a stop is requested; saves in both cases.

        Raises:
            Exception: raised by a callback; re-raised after a save.
            EvaluationError: an evaluation gave no usable metrics; raised after a save.
            OutputError: metrics cannot be written; raised after an attempt to save.
        """
        with _heap_at_rest():
            try:
                self._fit()
                self._finish_save()
            finally:
                with suppress(Exception):  # another error is reported
                    self._background.wait()

    def _fit(self) -> None:
        settings = self.stage.settings
        self._settle_best()
        if not self.stop():
            self._begin()
        while self.stage.step < settings.steps and not self.stop() and self.ended_early is None:
            if self._background.is_done:
                self._finish_save()
            try:
                metrics = self.stage.advance()
                last = self.stage.step == settings.steps
                failed = self._measure(last=last)
            except OutputError:
                self._rescue()
                raise
            except PreemptedError:
                break
            refused = self._call_back(metrics)
            failed = failed or refused
            ending = self.stop() or failed is not None or self.ended_early is not None
            if self.preempted() and failed is None:
                break
            if self._is_save_due(last=last, ending=ending) or self.stage.evaluations.is_best(self.stage.step):
                self.save() if failed is None else self._rescue()
            if failed is not None:
                raise failed
        if self.preempted():
            self._save_preempted()
        if self.ended_early is not None and self.stage.step < settings.steps:
            self.output.view.notice(self.ended_early)

    def _begin(self) -> None:
        try:
            self.stage.begin()
        except EvaluationStoppedError:
            return
        self._settle_best()  # the evaluation that the previous process missed may be the best one

    @property
    def ended_early(self) -> str | None:
        """Reason why the stage ends before its last step; None while it does not."""
        return self.stage.evaluations.why_ended

    @property
    def best(self) -> BestRecord | None:
        """The best checkpoint, if a metric for it is configured."""
        best = self.stage.evaluations.progress.best
        return None if best is None else BestRecord.model_validate(asdict(best))

    @property
    def best_checkpoint(self) -> Path | None:
        """Folder of the best checkpoint."""
        return None if self.best is None else self.store.path_of(self.best.step)

    def load_best(self) -> BestRecord | None:
        """Loads the weights of the best checkpoint; None if there is none, or the current step is the best one."""
        best, folder = self.best, self.best_checkpoint
        if best is None or folder is None or best.step == self.stage.step:
            return None
        self.session.load_roles(folder, timeout_s=self.save_timeout_s)
        return best

    def save(self) -> Path:
        """Writes a checkpoint: the state of every trained role, the model, and everything else a resume needs."""
        self._finish_save()
        self.stage.settle()
        step = self.stage.step
        self._saving_step = step
        state = {**self.stage.state_dict(), **reference_state(self.session.reference, self.store.folder)}
        best = self.best if self.stage.evaluations.is_best(step) else None
        self._mark_in_journal(step)
        with ExitStack() as stack:
            stack.enter_context(self.output.view.phase("save"))
            if self.in_background:
                self._background.start(self._begin_save(self.store.write(step, copy.deepcopy(state), best=best)))
                return self.store.path_of(step)
            draft = stack.enter_context(self.store.write(step, state, best=best))
            self.session.save_roles(draft, timeout_s=self.save_timeout_s)
            if self._exports:
                export_policy(
                    self.session,
                    self.tokenizer,
                    draft / MODEL_FOLDER,
                    card=self.card(),
                    timeout_s=self.save_timeout_s,
                )
            self.stage.save_parts(draft)
            atomic_write_text(draft / "config.yaml", self.config_text)
        return self._is_saved()

    def _mark_in_journal(self, step: int) -> None:
        """Begins a part of the journal, so that earlier ones can be removed. A checkpoint is whole without it."""
        try:
            self.stage.saving(step)
        except OutputError:
            if not self._is_rescuing:
                raise

    @property
    def _exports(self) -> bool:
        """Whether the current checkpoint includes the exported model; intermediate steps need none."""
        settings, step = self.stage.settings, self.stage.step
        if not settings.exports or not self.session.actor.can(Capability.EXPORT):
            return False
        if settings.export_every is None or step % settings.export_every == 0 or step == settings.steps:
            return True
        return self.stop() or self.ended_early is not None or self.stage.evaluations.is_best(step)

    def _is_saved(self) -> Path:
        step = self._saving_step
        self.last_checkpoint = self.store.path_of(step)
        self.stage.saved(step, min(step for step, _ in self.store.whole()))
        self.output.view.saved(step, self.last_checkpoint)
        return self.last_checkpoint

    def card(self) -> str | None:
        """Model card for an export of the current model; None if the run's configuration is unknown."""
        return card_of(self.stage, self.config_text)

    def _begin_save(self, writing: AbstractContextManager[Path]) -> Callable[[], None]:
        """Requests the roles' parts; later calls run after these. Returns a function that waits for the parts and
        completes the checkpoint."""
        with ExitStack() as stack:
            draft = stack.enter_context(writing)
            answers = self.session.begin_save_roles(draft)
            exports = self._exports
            if exports:
                (draft / MODEL_FOLDER).mkdir()
                answers.append(self.session.actor.submit("save_pretrained", str(draft / MODEL_FOLDER)))
            finish_parts = self.stage.begin_save_parts(draft)
            card = self.card() if exports else None
            entered = stack.pop_all()

        def finish() -> None:
            with entered:
                for answer in answers:
                    answer.result(self.save_timeout_s)
                if exports:
                    complete_export(self.tokenizer, draft / MODEL_FOLDER, card)
                finish_parts()
                atomic_write_text(draft / "config.yaml", self.config_text)

        return finish

    def _finish_save(self) -> None:
        """Waits for the checkpoint that is being written in the background.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._background.wait():
            self._is_saved()

    def _save_preempted(self) -> None:
        """Stops running samples, and saves the last complete step if it can be resumed exactly; otherwise the resume
        uses an earlier checkpoint and the journal.

        Raises:
            CheckpointError: the checkpoint in the background could not be written; raised after an attempt to save.
            OutputError: the samples cannot be written; raised after an attempt to save.
        """
        step, failed = self.stage.step, self._halt()
        exact = self.stage.halt()
        last = step == self.stage.settings.steps
        due = bool(step) and self.last_checkpoint != self.store.path_of(step)
        if due and self._is_save_due(last=last, ending=True):
            if not exact:
                where = "its samples come from the journal" if failed is None else "its samples are lost"
                self.output.view.notice(
                    f"step {step} is not saved: samples under way were begun with older weights. A resumed run makes "
                    f"it again from the newest checkpoint, and {where}"
                )
            elif failed is None:
                self.save()
            else:
                self._rescue()
        if failed is not None:
            raise failed

    def _halt(self) -> CheckpointError | OutputError | None:
        """Waits for the checkpoint in the background and stops running samples; returns the last error of the two."""
        failed: CheckpointError | OutputError | None = None
        for act in (self._finish_save, self.stage.halt):
            try:
                act()
            except (CheckpointError, OutputError) as error:
                failed = error
        return failed

    def _rescue(self) -> None:
        """Tries to save the last complete step before another error is raised. An error of this save is only
        reported."""
        self._is_rescuing = True
        try:
            if self.output.run_dir.is_dir() and self.stage.settings.save_every is not None:
                self.save()
                self._finish_save()
        except Exception as error:
            self.output.view.notice(f"no checkpoint of step {self.stage.step}: {error}")

    def restore(self, checkpoint: Path) -> None:
        """Restores the state of a whole checkpoint.

        Raises:
            CheckpointError: it is not whole, or was written with other data.
        """
        saved = read_state(checkpoint)
        self.session.load_roles(checkpoint, timeout_s=self.save_timeout_s)
        self.stage.load_state_dict(saved)
        self.stage.load_parts(checkpoint)
        self.last_checkpoint = checkpoint

    def _measure(self, *, last: bool) -> Exception | None:
        """Runs the evaluation that is due; returns an error that must end the run after a save, or None."""
        try:
            self.stage.measure(last=last)
        except EvaluationStoppedError:
            begins = "" if self.stage.settings.save_every is None else "; a resumed run begins with that"
            self.output.view.notice(f"step {self.stage.step} was not measured{begins}")
        except (EvaluationError, ConfigError) as error:
            return error
        return None

    def _settle_best(self) -> None:
        """Aligns the record of the best checkpoint with the current step: after a resume it may name a later
        checkpoint, and the best checkpoint as of this step may be deleted or in another run's folder."""
        best, progress = self.best, self.stage.evaluations.progress
        if best is not None and faults(self.store.path_of(best.step)):
            self.output.view.notice(f"the best checkpoint so far ({best.line()}) is not in {self.store.folder}: the "
                                    "searching for the best checkpoint again")  # fmt: skip
            self.stage.evaluations.progress = replace(progress, best=None)
            best = None
        if best != self.store.best():
            self.store.mark_best(best)

    def _call_back(self, metrics: Any) -> Exception | None:
        """Calls every callback; returns the first error, which ends the run after a save."""
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
        if last:  # also if the last step must still be evaluated
            return settings.saves_last or self.stage.evaluations.missed is not None
        return ending or self.stage.step % settings.save_every == 0
