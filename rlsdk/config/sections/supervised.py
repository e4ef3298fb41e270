"""Supervised training on the reference answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from rlsdk.config.problem import Problem
from rlsdk.config.sections.base import Section, steps_of_share


class SftConfig(Section):
    """Supervised training on the reference answers: the warm start of `rlsdk train`, and all of `rlsdk sft`."""

    steps: NonNegativeInt = 0
    """Optimizer steps; 0: no supervised training."""
    epochs: PositiveFloat | None = None
    """Passes over the rows, in place of `steps`; rounded up to whole steps. null: `steps` is used."""
    rows_per_step: PositiveInt = 64
    """Rows in one optimizer step."""
    lr: PositiveFloat = 1e-5
    """Peak learning rate. The other settings are those of `train.optim`; the optimizer is reset afterwards."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    warmup_ratio: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Share of the optimizer steps that are warm-up, in place of `warmup_steps`; rounded up. null: `warmup_steps`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or a linear or cosine decay to `train.optim.min_lr_ratio`."""
    save_every_steps: PositiveInt | None = 100
    """Optimizer steps between checkpoints, from which an interrupted run resumes; null: no checkpoints."""
    turns: Literal["all", "last"] = "all"
    """Turns of the assistant that are learned of a conversation: all, in one row where the chat template keeps earlier
    turns as they are and in a row each where it changes them; or the last one, to which the others are the prompt."""
    answer_template: str = "{answer}"
    """Text that is learned; `{answer}` and `{any_field_of_the_row}` are filled in."""
    long_answers: Literal["drop", "cut"] = "drop"
    """Answers longer than `rollout.max_response_tokens`. drop: the row is dropped, and counted; cut: trains on the
    first tokens, without the token that ends a turn, so that the model does not learn to stop early."""

    @property
    def is_asked(self) -> bool:
        """Whether supervised training is configured."""
        return self.steps > 0 or self.epochs is not None

    def problems(self) -> Iterator[Problem]:
        known = self.epochs is None  # otherwise the steps depend on the data; checked again once it is read
        if known and self.warmup_ratio is None and self.schedule != "constant" and self.warmup_steps >= self.steps > 0:
            yield Problem("warmup_steps", value=self.warmup_steps, expected=f"fewer than sft.steps {self.steps}")

    def unused(self) -> Iterator[Problem]:
        if self.epochs is not None:
            yield Problem("steps", f"sft.epochs is {self.epochs:g}")
        yield from steps_of_share(self.warmup_ratio)
