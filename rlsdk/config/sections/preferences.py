"""The section of training from preferences: `rlsdk reward-model`, `dpo`, `kto` and `process-reward`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rlsdk.config.problem import Problem
from rlsdk.config.sections.base import Section, steps_of_share

REFERENCE_FREE = ("simpo", "orpo", "cpo")
"""Values of `loss` that need no reference model."""
SMOOTHED = ("sigmoid", "simpo", "cpo")
"""Values of `loss` that take `label_smoothing`."""
SUPERVISED = ("orpo", "cpo")
"""Values of `loss` that have a supervised term of weight 1."""


class PreferencesConfig(Section):
    """Training from preferences: pairs of answers (`rlsdk reward-model`, `rlsdk dpo`), labelled answers (`rlsdk kto`)
    or solutions with labelled steps (`rlsdk process-reward`). Rows for evaluation are held out as `data` and `eval` say
    (`data.eval`, `data.num_eval_rows`, `eval.every_steps`, `eval.at_start`)."""

    steps: PositiveInt = 100
    """Optimizer steps."""
    epochs: PositiveFloat | None = None
    """Passes over the pairs, labelled answers or solutions, in place of `steps`; rounded up to whole steps. null:
    `steps`."""
    pairs_per_step: PositiveInt = 64
    """Pairs in one optimizer step; each is two rows. KTO: labelled answers, at least 2. Process rewards: solutions in
    steps."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate. The other optimizer settings are those of `train.optim`."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    warmup_ratio: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Share of the optimizer steps that are warm-up, in place of `warmup_steps`; rounded up. null: `warmup_steps`."""
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
    label_field: str = "label"
    """KTO: field of a row that says whether its answer is desirable: true or false, 1 or 0. The answer is the one that
    `rlsdk sft` would learn (`data.answer_field`, or the assistant's last turn)."""
    desirable_weight: NonNegativeFloat = 1.0
    """KTO: weight of the loss of desirable answers."""
    undesirable_weight: NonNegativeFloat = 1.0
    """KTO: weight of the loss of undesirable answers. The paper advises weights with which the numbers of answers times
    their weights stand in a ratio of 1 to 4/3, desirable to undesirable."""
    step_field: str = "completions"
    """Process rewards: field of a row with the texts of the steps, a list. Rows in the form of Math-Shepherd or PRM800K
    need none."""
    step_label_field: str = "labels"
    """Process rewards: field of a row with the labels of the steps, a list: true or false, a number from 0 to 1, or
    null for a step that is not learned."""
    step_separator: str = Field(default="\n", min_length=1)
    """Process rewards: text between two steps."""
    answer_template: str = "{answer}"
    """Template of answers; `{answer}` and `{any_field_of_the_row}` are filled in."""
    long_answers: Literal["drop", "cut"] = "drop"
    """Pairs with an answer longer than `rollout.max_response_tokens`. drop: dropped, and counted; cut: trains on the
    first tokens, without the token that ends a turn."""
    center_coef: NonNegativeFloat = 0.0
    """Reward model: weight of the squared sum of a pair's scores, which keeps scores near 0. Typical value: 0.01."""
    loss: Literal["sigmoid", "ipo", "hinge", "simpo", "orpo", "cpo"] = "sigmoid"
    """DPO: sigmoid, as published; ipo, with a target margin of 1 / (2 beta) per token; hinge. Without a reference
    model: simpo, on log-probs per token with a `target_margin`; orpo, on odds; cpo, on log-probs of whole answers."""
    beta: PositiveFloat = 0.1
    """DPO, KTO: strength of the KL constraint; the implicit reward of an answer is beta * log(policy / reference). With
    simpo and cpo it is beta * log(policy), with a beta of 2.0 to 2.5 in SimPO's paper; orpo: weight of the odds-ratio
    term."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """DPO: assumed share of pairs whose labels are swapped (sigmoid, simpo and cpo)."""
    target_margin: NonNegativeFloat = 0.5
    """DPO with simpo: margin by which the reward of the better answer should be higher; gamma in the paper."""
    sft_coef: NonNegativeFloat | None = None
    """DPO: weight of the better answer's negative log-likelihood per token, added to the loss so that the answer does
    not become less likely (Pang et al. 2024; 0.2 in Llama 3). Use it if the answers of a pair are similar. null: 1 with
    orpo and cpo, whose papers have it so, otherwise 0."""

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with a reference model."""
        return self.loss not in REFERENCE_FREE

    @property
    def nll_coef(self) -> float:
        """`sft_coef`, or what it is where it is null."""
        return float(self.loss in SUPERVISED) if self.sft_coef is None else self.sft_coef

    def problems(self) -> Iterator[Problem]:
        known = self.epochs is None  # otherwise the steps depend on the data; checked again once it is read
        if known and self.warmup_ratio is None and self.schedule != "constant" and self.warmup_steps >= self.steps:
            yield Problem(
                "warmup_steps", value=self.warmup_steps, expected=f"fewer than preferences.steps {self.steps}"
            )
        if self.label_smoothing and self.loss not in SMOOTHED:
            named = f"needs loss {', '.join(map(repr, SMOOTHED))}, but it is {self.loss!r}"
            yield Problem("label_smoothing", f"{self.label_smoothing} {named}")
        if self.step_field == self.step_label_field:
            yield Problem("step_label_field", f"{self.step_label_field!r} is step_field as well; name two fields")
        if self.chosen_field == self.rejected_field:
            yield Problem("rejected_field", f"{self.rejected_field!r} is chosen_field as well; name two fields")

    def unused(self) -> Iterator[Problem]:
        if self.epochs is not None:
            yield Problem("steps", f"preferences.epochs is {self.epochs:g}")
        yield from steps_of_share(self.warmup_ratio)
