"""The section of training from preference pairs: `rlsdk reward-model` and `rlsdk dpo`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rlsdk.config.problem import Problem
from rlsdk.config.sections.base import Section


class PreferencesConfig(Section):
    """Training from preference pairs (`rlsdk reward-model`, `rlsdk dpo`). Pairs for evaluation are held out as `data`
    and `eval` say (`data.eval`, `data.num_eval_rows`, `eval.every_steps`, `eval.at_start`)."""

    steps: PositiveInt = 100
    """Optimizer steps."""
    epochs: PositiveFloat | None = None
    """Passes over the pairs, in place of `steps`; rounded up to whole steps. null: `steps` is used."""
    pairs_per_step: PositiveInt = 64
    """Pairs in one optimizer step; each is two rows."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate. The other optimizer settings are those of `train.optim`."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or a linear or cosine decay to `train.optim.min_lr_ratio`."""
    save_every_steps: PositiveInt | None = 100
    """Optimizer steps between checkpoints, from which an interrupted run resumes; null: no checkpoints."""
    chosen_field: str = "chosen"
    """Field of a row that holds the better answer: a text, or chat messages whose last one is the answer. Messages
    before it are the prompt; they must be the same in both fields."""
    rejected_field: str = "rejected"
    """Field of a row that holds the worse answer, in the same form."""
    margin_field: str | None = None
    """Reward model: field of a row with the margin by which the better answer's score should be higher; null: 0."""
    answer_template: str = "{answer}"
    """Template of both answers; `{answer}` and `{any_field_of_the_row}` are filled in."""
    long_answers: Literal["drop", "cut"] = "drop"
    """Pairs with an answer longer than `rollout.max_response_tokens`. drop: dropped, and counted; cut: trains on the
    first tokens, without the token that ends a turn."""
    center_coef: NonNegativeFloat = 0.0
    """Reward model: weight of the squared sum of a pair's scores, which keeps scores near 0. Typical value: 0.01."""
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """DPO: sigmoid, as published; ipo, with a target margin of 1 / (2 beta) per token; hinge."""
    beta: PositiveFloat = 0.1
    """DPO: strength of the KL constraint; the implicit reward of an answer is beta * log(policy / reference)."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """DPO: assumed share of pairs whose labels are swapped."""
    sft_coef: NonNegativeFloat = 0.0
    """DPO: weight of the better answer's negative log-likelihood per token, added to the loss so that the answer does
    not become less likely (Pang et al. 2024; 0.2 in Llama 3). Use it if the answers of a pair are similar."""

    def problems(self) -> Iterator[Problem]:
        known = self.epochs is None  # otherwise the steps depend on the data; checked again once it is read
        if known and self.schedule != "constant" and self.warmup_steps >= self.steps:
            yield Problem(
                "warmup_steps", value=self.warmup_steps, expected=f"fewer than preferences.steps {self.steps}"
            )
        if self.label_smoothing and self.loss != "sigmoid":
            yield Problem("label_smoothing", f"{self.label_smoothing} needs loss 'sigmoid', but it is {self.loss!r}")
        if self.chosen_field == self.rejected_field:
            yield Problem("rejected_field", f"{self.rejected_field!r} is chosen_field as well; name two fields")

    def unused(self) -> Iterator[Problem]:
        if self.epochs is not None:
            yield Problem("steps", f"preferences.epochs is {self.epochs:g}")
