"""Sections on the algorithm: how rewards become a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rlsdk.config.base import Options, Section, empty_mapping, empty_tuple
from rlsdk.config.problem import Problem


class CorrectionConfig(Section):
    """What is done about samples that another policy made than the one whose log-probs an update takes as old: another
    engine's rounding and kernels, or older weights."""

    mode: Literal["none", "truncate", "mask"] = "none"
    """Each response token's loss is weighed with old / rollout. truncate: the ratio, cut to the bounds; mask: the ratio
    within the bounds, 0 outside."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Of each token; of the whole response (the product); or the mean over a response's tokens."""
    upper: PositiveFloat = 2.0
    """Largest ratio."""
    lower: NonNegativeFloat = 0.0
    """Smallest ratio."""
    reject: Literal["none", "token", "sequence", "geometric"] = "none"
    """Leaves out rows whose ratio at this level is outside the bounds below; their score still counts for the group."""
    reject_upper: PositiveFloat = 1.001
    """Largest ratio of a row that is kept; for `token` think of 1e4, for `sequence` of 2."""
    reject_lower: NonNegativeFloat = 0.999
    """Smallest ratio of a row that is kept."""

    @property
    def is_on(self) -> bool:
        return self.mode != "none" or self.reject != "none"

    def problems(self) -> Iterator[Problem]:
        if self.lower >= self.upper:
            yield Problem("lower", f"{self.lower}: expected less than upper {self.upper}")
        if self.reject_lower >= self.reject_upper:
            yield Problem("reject_lower", f"{self.reject_lower}: expected less than reject_upper {self.reject_upper}")


class LengthConfig(Section):
    """What the length of a response does to its score and its loss."""

    overlong_filter: bool = False
    """Truncated responses carry no loss; their score counts for the group."""
    soft_tokens: PositiveInt | None = None
    """Width in tokens of DAPO's soft punishment below `rollout.max_response_tokens`; null: none."""
    soft_factor: PositiveFloat = 1.0
    """Largest soft punishment, in units of reward."""
    penalty: NonNegativeFloat = 0.0
    """Taken from the score for each response token beyond `free_tokens`."""
    free_tokens: NonNegativeInt = 0
    """Response tokens without a penalty."""
    shorter_reward: NonNegativeFloat = 0.0
    """Weight of a reward for being shorter than the other responses to the prompt."""


class DynamicSamplingConfig(Section):
    """Groups whose samples all have the same score teach a group estimator nothing: other prompts take their place."""

    enabled: bool = False
    """Starts another group for each that has no signal, so that a step trains `trainer.prompts_per_step` with some."""
    min_spread: NonNegativeFloat = 0.0
    """Largest less smallest score of a group must be more than this."""
    max_groups: PositiveFloat = 3.0
    """Most groups that are started for a step, in units of `trainer.prompts_per_step`; past it groups without signal
    are trained on."""


class PtxConfig(Section):
    """A supervised term beside the policy gradient (PPO-ptx, arXiv 2203.02155): given answers are learned in the same
    optimizer steps, so that the policy keeps what it was trained on before."""

    coef: NonNegativeFloat = 0.0
    """Weight of the mean negative log-likelihood (nats per token) of the answers; 0: no such term."""
    rows_per_update: PositiveInt = 16
    """Answers in each optimizer step; all come before one comes again."""
    source: str | None = None
    """As `data.train`; null: the answers of the training prompts."""
    source_options: Options = empty_mapping()
    """Parameters of the source."""
    answer_template: str = "{answer}"
    """Text that is learned; `{answer}` and `{any_field_of_the_row}` are filled in."""

    def problems(self) -> Iterator[Problem]:
        if self.source is not None and not self.coef:
            yield Problem("source", f"{self.source!r} has no effect: coef is 0.0")


class AlgorithmConfig(Section):
    """How rewards become a gradient."""

    recipe: str | None = None
    """Name of the parts that these fields begin with, also `--algorithm NAME`; `rlsdk algorithms list` shows them."""
    name: str = "policy_gradient"
    """Registered algorithm, `pkg.mod:Class`, or `file.py:Class` (see `rlsdk.interfaces.Algorithm`). policy_gradient is
    composed of the fields below; another reads of them what it likes."""
    options: Options = empty_mapping()
    """Options of an algorithm of your own (`AlgorithmContext.options`)."""
    roles: tuple[Literal["ref", "critic"], ...] = empty_tuple()
    """Models that it asks, beside those that the fields below need. Filled in from what an algorithm or an estimator of
    your own declares."""
    advantage: str = "grpo"
    """Registered advantage estimator, `pkg.mod:fn`, or `file.py:fn`."""
    advantage_options: Options = empty_mapping()
    """Keyword arguments of the estimator."""
    loss: str = "ppo_clip"
    """Registered policy loss, `pkg.mod:fn`, or `file.py:fn`."""
    loss_options: Options = empty_mapping()
    """Keyword arguments of the loss, for instance `clip_low` and `clip_high`."""
    loss_aggregation: str = "token_mean"
    """Registered aggregation, or `pkg.mod:fn`, over one mini-batch: token_mean, every response token weighs the same
    (long answers weigh more); sequence_mean, mean over tokens in a row, then over rows; sequence_sum, sum over tokens
    divided by `rollout.max_response_tokens`, then mean over rows."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL divergence (nats) from the reference policy; 0: no reference model is loaded."""
    kl_estimator: str = "k3"
    """Registered estimator, or `pkg.mod:fn`, of the KL at one token in the loss, from d = log_probs - ref: k2 d^2/2,
    k3 exp(-d) - 1 + d. One whose gradient is not that of a KL (k1) is refused."""
    kl_reward_estimator: str = "k1"
    """Registered estimator, or `pkg.mod:fn`, of the KL at one token in the reward: k1 d, and those above."""
    kl_in_reward: bool = False
    """True: the KL is taken from the tokens' rewards; false: added to the loss."""
    kl_target: PositiveFloat | None = None
    """Nats of KL per token that `kl_coef` is steered towards, where the KL is in the reward; null: it stays."""
    kl_horizon: PositiveFloat = 10_000.0
    """Samples after which a KL of 20 % off target has moved the coefficient by about 20 %."""
    entropy_coef: float = 0.0
    """Weight of the mean entropy (nats) that is subtracted from the loss."""
    entropy_share: float | None = Field(default=None, gt=0.0, le=1.0)
    """Share of each mini-batch's tokens, the most uncertain ones, that carry loss; null: all."""
    value_clip: PositiveFloat | None = 0.2
    """How far a value may move from the old one before its error stops pushing, in units of reward; null: no clip."""
    old_log_probs: Literal["auto", "always", "rollout", "decoupled"] = "auto"
    """Where the ratio's denominator comes from. auto: recomputed by the train engine unless the step makes one
    update, where it equals the current one; always: recomputed; rollout: as the rollout engine gave them; decoupled:
    recomputed, and the distance to the sampler is a weight (see `correction`)."""
    correction: CorrectionConfig = CorrectionConfig()
    """What is done about samples of another policy."""
    lengths: LengthConfig = LengthConfig()
    """What the length of a response does."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    """What is done about prompts that teach nothing."""
    ptx: PtxConfig = PtxConfig()
    """A supervised term on given answers."""
    skip_zero_advantage: bool = True
    """Leaves rows whose advantage is 0 out of updates, where loss and coefficients are such that they have no gradient:
    the same update for less work."""

    def problems(self) -> Iterator[Problem]:
        if self.kl_in_reward and self.kl_coef == 0:
            yield Problem("kl_in_reward", "True needs algorithm.kl_coef above 0, but it is 0.0")
        if self.kl_target is not None and not self.kl_in_reward:
            yield Problem("kl_target", f"{self.kl_target} steers the KL of the reward; set kl_in_reward true as well")
        if self.old_log_probs == "rollout" and self.correction.is_on:
            yield Problem(
                "correction",
                "needs recomputed log-probs, but old_log_probs is 'rollout', whose ratio holds the sampler's already; "
                "choose 'decoupled'",
            )
