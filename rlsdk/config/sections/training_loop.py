"""The training loop: steps, checkpoints, comparison of the engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from rlsdk.config.problem import Problem
from rlsdk.config.sections.base import Section, empty_tuple
from rlsdk.interfaces.settings import NO_INFLUENCE


class TrainerConfig(Section):
    """The training loop."""

    steps: Annotated[NonNegativeInt, NO_INFLUENCE] = 200
    """Trainer steps; each samples once, then makes its updates."""
    epochs: Annotated[PositiveFloat | None, NO_INFLUENCE] = None
    """Passes over the training prompts, in place of `steps`; rounded up to whole steps. For a mixture: draws of as many
    prompts as all sources have. null: `steps` is used."""
    prompts_per_step: PositiveInt = 64
    """Prompts in one step."""
    samples_per_prompt: PositiveInt = 8
    """Responses to each prompt (group size)."""
    updates_per_step: PositiveInt = 1
    """Mini-batches (optimizer steps) into which a step's samples are split, per epoch of the step."""
    epochs_per_step: PositiveInt = 1
    """Epochs over the samples of one step."""
    seed: NonNegativeInt = 0
    """Seed of data order, sampling and random initial weights."""
    run_dir: Annotated[str, NO_INFLUENCE] = "runs"
    """Folder that contains a folder for every run."""
    run_name: Annotated[str | None, NO_INFLUENCE] = None
    """Name of the run's folder; null: date and time."""
    save_every_steps: Annotated[PositiveInt | None, NO_INFLUENCE] = 50
    """Trainer steps between checkpoints; the last step is always saved. null: no checkpoints."""
    export_every_steps: Annotated[PositiveInt | None, NO_INFLUENCE] = None
    """Trainer steps between checkpoints that also contain the model in Hugging Face format; a multiple of
    `save_every_steps`. The last and the best checkpoint always contain it. null: every checkpoint."""
    keep_checkpoints: Annotated[PositiveInt, NO_INFLUENCE] = 3
    """Number of newest checkpoints to keep; the newest one that contains the model is kept as well."""
    resume: Annotated[str, NO_INFLUENCE] = "auto"
    """auto: from the newest complete checkpoint of this run's folder, if any; never; or the path of a checkpoint or
    run."""
    parity_threshold: Annotated[PositiveFloat, NO_INFLUENCE] = 0.05
    """Largest mean difference in nats between log-probs of the rollout and the train engine for the same tokens."""
    parity_action: Annotated[Literal["warn", "error"], NO_INFLUENCE] = "warn"
    """Action if `parity_threshold` is exceeded."""
    callbacks: Annotated[tuple[str, ...], NO_INFLUENCE] = empty_tuple()
    """Registered step callbacks, `pkg.mod:fn`, or `file.py:fn`."""

    @property
    def samples_per_step(self) -> int:
        """Samples in one step."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps * self.updates_per_step * self.epochs_per_step

    def problems(self) -> Iterator[Problem]:
        if self.updates_per_step > self.samples_per_step:
            samples = f"{self.prompts_per_step} prompts x {self.samples_per_prompt} samples = {self.samples_per_step}"
            yield Problem("updates_per_step", f"{self.updates_per_step} is more than a step's samples ({samples})")
        if self.export_every_steps is not None:
            yield from self._export_problems(self.export_every_steps)

    def unused(self) -> Iterator[Problem]:
        if self.epochs is not None:
            yield Problem("steps", f"trainer.epochs is {self.epochs:g}")

    def _export_problems(self, every: int) -> Iterator[Problem]:
        saves = self.save_every_steps
        if saves is None:
            yield Problem("export_every_steps", f"{every} has no effect: save_every_steps is null, nothing is saved")
        elif every % saves:
            fitting = max(1, round(every / saves)) * saves
            yield Problem(
                "export_every_steps",
                f"{every} is no multiple of save_every_steps, which is {saves}: a model is exported with a checkpoint; "
                f"the nearest that fits is {fitting}",
            )
