"""The loop: steps of a stage, measured, saved and resumed. One for every kind of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlsdk.interfaces import Capability
from rlsdk.kit.atomic import atomic_write_text
from rlsdk.trainer.checkpoint import CheckpointStore, read_state
from rlsdk.trainer.stage import RunOutput, Stage

MODEL_FOLDER = "model"
"""Of a checkpoint: the policy in Hugging Face form."""


class SavedRole(Protocol):
    """A role whose engine has state of its own, as the loop sees it."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> frozenset[str]: ...

    def run(self, method: str, *args: Any, timeout_s: float | None = None) -> Any: ...


class Trainer:
    """Runs one stage to its end. Lives in the controller process, which owns no device."""

    def __init__(
        self,
        stage: Stage,
        roles: Sequence[SavedRole],
        output: RunOutput,
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
            roles: those that are trained, each saved in a folder of its name; the first is the one that is exported.
            output: where numbers go.
            tokenizer: goes beside the exported model.
            config_text: goes into every checkpoint.
            keep_checkpoints: newest ones that are kept.
            save_timeout_s: deadline of each role's part of a checkpoint; None: that of its group.
            stop: asked between steps; True saves and returns.
        """
        self.stage = stage
        self.roles = roles
        self.output = output
        self.tokenizer = tokenizer
        self.config_text = config_text
        self.save_timeout_s = save_timeout_s
        self.stop = stop
        self.last_checkpoint: Path | None = None
        self.store = CheckpointStore(output.run_dir / stage.settings.folder, keep_checkpoints)

    def fit(self) -> None:
        """Steps until the stage is over or a stop is requested, which is saved.

        Raises:
            Exception: what a callback raised, after a save.
        """
        settings = self.stage.settings
        self.stage.begin()
        while self.stage.step < settings.steps and not self.stop():
            metrics = self.stage.advance()
            last = self.stage.step == settings.steps
            self.stage.measure(last=last)
            failed = self._call_back(metrics)
            if self._is_save_due(last=last, ending=self.stop() or failed is not None):
                self.save()
            if failed is not None:
                raise failed

    def save(self) -> Path:
        """Writes a checkpoint: the state of every trained role, the model, and everything else a resume needs."""
        step = self.stage.step
        with self.output.view.phase("save"), self.store.write(step, self.stage.state_dict()) as draft:
            for role in self.roles:
                (draft / role.name).mkdir()
                role.run("save_checkpoint", str(draft / role.name), timeout_s=self.save_timeout_s)
            if self.stage.settings.exports and Capability.EXPORT in self.roles[0].capabilities:
                self._export(draft / MODEL_FOLDER)
            atomic_write_text(draft / "config.yaml", self.config_text)
        self.last_checkpoint = self.store.folder / f"step_{step:08d}"
        self.output.view.saved(step, self.last_checkpoint)
        return self.last_checkpoint

    def restore(self, checkpoint: Path) -> None:
        """Goes on from a whole checkpoint.

        Raises:
            CheckpointError: it is not whole, or of another run's data.
        """
        saved = read_state(checkpoint)
        for role in self.roles:
            role.run("load_checkpoint", str(checkpoint / role.name), timeout_s=self.save_timeout_s)
        self.stage.load_state_dict(saved)
        self.last_checkpoint = checkpoint

    def _export(self, folder: Path) -> None:
        folder.mkdir()
        self.roles[0].run("save_pretrained", str(folder), timeout_s=self.save_timeout_s)
        self.tokenizer.save_pretrained(str(folder))

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
