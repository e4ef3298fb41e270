"""Resolves a model path: a run, one of its checkpoints, or a model folder. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlsdk.interfaces import CheckpointError, ConfigError
from rlsdk.interfaces.spelling import as_given
from rlsdk.trainer.checkpoints.checkpoint import CheckpointStore, damage, faults, holds_model, is_model, older_whole
from rlsdk.trainer.checkpoints.run_folder import CHECKPOINTS, CONFIG_FILE, Notice, silent

BEST, NEWEST = "best", "newest"
"""Names of checkpoints that are accepted in addition to step numbers."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A resolved model path."""

    model: Path
    """Folder of a model in Hugging Face format, or of an adapter in PEFT's."""
    config: Path | None
    """Configuration that it was trained with, if it comes from a run."""


def find_model(path: Path, notice: Notice = silent, *, checkpoint: str | None = None) -> ModelSource:
    """Finds the model of a run, a checkpoint or a model folder.

    Args:
        path: path of a run, a checkpoint or a model folder.
        notice: receives a line for each damaged checkpoint of a run that is skipped.
        checkpoint: which checkpoint of a run: `best`, `newest`, or a step, as `20` or `step_00000020`; None: the
            newest.

    Raises:
        ConfigError: it is none of these, or damaged; says what was expected.
    """
    if checkpoint not in (None, NEWEST):
        return _of_checkpoint(_chosen(path, str(checkpoint)))
    try:
        store = CheckpointStore(path / CHECKPOINTS, 1)
        intact = path if not faults(path) else store.newest_intact(notice, "model")
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    if intact is not None:
        return _of_checkpoint(intact)
    if is_model(path):
        return ModelSource(model=path, config=None)
    if (path / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{str(path)!r} is a run without a checkpoint yet: it ended before its first one, or still trains "
            "(trainer.save_every_steps)"
        )
    raise ConfigError(
        f"{str(path)!r} is no run (checkpoints/step_N), no whole checkpoint ({faults(path)[0]}) and no model folder "
        "(config.json, or adapter_config.json); give one of the three"
    )


def _of_checkpoint(checkpoint: Path) -> ModelSource:
    if not holds_model(checkpoint):
        exported = [str(path) for _, path in CheckpointStore(checkpoint.parent, 1).whole() if holds_model(path)]
        others = f"those with one: {', '.join(exported[-3:])}" if exported else "its train backend cannot export one"
        raise ConfigError(
            f"checkpoint {str(checkpoint)!r} has no model/ (trainer.export_every_steps says which have); {others}"
        )
    if problems := damage(checkpoint, "model"):
        raise ConfigError(
            f"checkpoint {str(checkpoint)!r} is damaged: {'; '.join(problems[:3])}{older_whole(checkpoint)}"
        )
    return ModelSource(model=checkpoint / "model", config=checkpoint / "config.yaml")


def _chosen(run: Path, name: str) -> Path:
    """Folder of the run's checkpoint with this name.

    Raises:
        ConfigError: it does not exist; lists the existing ones.
    """
    store = CheckpointStore(run / CHECKPOINTS, 1)
    if name == BEST:
        best = store.best()
        if best is not None:
            return store.path_of(best.step)
        wrong = "no best checkpoint is recorded there: set checkpoint.best.metric when you train"
    else:
        digits = name.removeprefix("step_")
        if digits.isdecimal() and not faults(store.path_of(int(digits))):
            return store.path_of(int(digits))
        wrong = f"expected {BEST!r}, {NEWEST!r} or a step"
    steps = [str(step) for step, _ in store.whole()]
    raise ConfigError(
        f"{as_given('checkpoint', name)}: {wrong}; {str(run)!r} has checkpoints of steps {', '.join(steps) or '(none)'}"
    )
