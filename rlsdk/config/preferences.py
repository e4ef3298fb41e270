"""The section on training from pairs of answers: `rlsdk reward-model` and `rlsdk dpo`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rlsdk.config.base import Section
from rlsdk.config.problem import Problem


class PreferencesConfig(Section):
    """Training from pairs of answers, a better and a worse one: all of `rlsdk reward-model` and `rlsdk dpo`. Pairs
    that are never trained on are held out and measured as `data` and `eval` say (`data.eval`, `data.num_eval_rows`,
    `eval.every_steps`, `eval.at_start`)."""

    steps: PositiveInt = 100
    """Optimizer steps."""
    epochs: PositiveFloat | None = None
    """In place of `steps`: passes over the pairs that are used, rounded up to whole steps. null: `steps` counts."""
    pairs_per_step: PositiveInt = 64
    """Pairs in one optimizer step; each is two rows."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate; the rest of the optimizer is as in `train.optim`."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or linear or cosine to `train.optim.min_lr_ratio`."""
    save_every_steps: PositiveInt | None = 100
    """Optimizer steps between checkpoints, from which a run that was killed goes on; null: none at all."""
    chosen_field: str = "chosen"
    """Field of a row that holds the better answer: a text, or a list of chat messages, of which the last is taken."""
    rejected_field: str = "rejected"
    """Field of a row that holds the worse answer, as `chosen_field`."""
    margin_field: str | None = None
    """Reward model: field of a row with a number, by how much the better answer's score is to win; null: 0."""
    answer_template: str = "{answer}"
    """Text of either answer; `{answer}` and `{any_field_of_the_row}` are filled in."""
    long_answers: Literal["drop", "cut"] = "drop"
    """Pairs with an answer longer than `rollout.max_response_tokens`. drop: left out and counted; cut: the first tokens
    are taken, without an end-of-sequence token."""
    center_coef: NonNegativeFloat = 0.0
    """Reward model: weight of the squared sum of a pair's two scores, which keeps them around 0; think of 0.01."""
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """DPO: sigmoid, as published; ipo, which stops at a margin of 1 / (2 beta) per token; hinge."""
    beta: PositiveFloat = 0.1
    """DPO: how dear it is to leave the reference; an answer's implicit reward is beta * log(policy / reference)."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """DPO: share of the pairs that are taken to be the wrong way round."""
    sft_coef: NonNegativeFloat = 0.0
    """DPO: weight of the better answer's negative log-likelihood per token beside the loss, so that the answer does not
    become less likely (Pang et al. 2024; 0.2 in Llama 3). Use it where the two answers of a pair are similar."""

    def problems(self) -> Iterator[Problem]:
        known = self.epochs is None  # else steps follow from the data: asked again once it was read
        if known and self.schedule != "constant" and self.warmup_steps >= self.steps:
            yield Problem("warmup_steps", f"{self.warmup_steps}: expected fewer than preferences.steps {self.steps}")
        if self.label_smoothing and self.loss != "sigmoid":
            yield Problem("label_smoothing", f"{self.label_smoothing} needs loss 'sigmoid', but it is {self.loss!r}")
        if self.chosen_field == self.rejected_field:
            yield Problem("rejected_field", f"{self.rejected_field!r} is chosen_field as well; name two fields")
