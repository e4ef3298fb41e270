"""Sections of the algorithm: how rewards become a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rlsdk.config.problem import Problem
from rlsdk.config.sections.base import Options, Section, empty_mapping, empty_tuple, fields_of
from rlsdk.config.sections.old_log_probs import choose_old_log_probs
from rlsdk.config.sections.role_kinds import OptionalRole
from rlsdk.interfaces.spelling import Setting

POLICY_GRADIENT = "policy_gradient"
"""Name of the algorithm that is composed of the fields of this section."""


class CorrectionConfig(Section):
    """Correction for samples from another policy than the one whose log-probs an update takes as old: because of
    another engine's rounding and kernels, or of older weights."""

    mode: Literal["none", "truncate", "mask"] = "none"
    """Weights each response token's loss by the ratio of old to rollout probability. truncate: the ratio, clipped to
    the bounds; mask: the ratio within the bounds, 0 outside."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio of each token; of the whole response (the product of its tokens' ratios); or their geometric mean."""
    upper: PositiveFloat = 2.0
    """Upper bound of the ratio."""
    lower: NonNegativeFloat = 0.0
    """Lower bound of the ratio."""
    reject: Literal["none", "token", "sequence", "geometric"] = "none"
    """Drops rows whose ratio at this level is outside `reject_lower` and `reject_upper`; their score still counts for
    the group."""
    reject_upper: PositiveFloat = 1.001
    """Largest ratio of a row that is kept. Typical values: 1e4 for `token`, 2 for `sequence`."""
    reject_lower: NonNegativeFloat = 0.999
    """Smallest ratio of a row that is kept."""

    @property
    def is_on(self) -> bool:
        return self.mode != "none" or self.reject != "none"

    def problems(self) -> Iterator[Problem]:
        if self.lower >= self.upper:
            yield Problem("lower", value=self.lower, expected=f"less than upper {self.upper}")
        if self.reject_lower >= self.reject_upper:
            yield Problem(
                "reject_lower", value=self.reject_lower, expected=f"less than reject_upper {self.reject_upper}"
            )

    def unused(self) -> Iterator[Problem]:
        if self.reject == "none":
            yield from fields_of(("reject_upper", "reject_lower"), "algorithm.correction.reject is 'none'")


class LengthConfig(Section):
    """Effects of a response's length on its score and its loss."""

    overlong_filter: bool = False
    """Excludes truncated responses from the loss; their score still counts for the group."""
    soft_tokens: PositiveInt | None = None
    """Width in tokens of DAPO's soft overlong punishment below `rollout.max_response_tokens`; null: none."""
    soft_factor: PositiveFloat = 1.0
    """Largest soft overlong punishment, in units of reward."""
    penalty: NonNegativeFloat = 0.0
    """Subtracted from the score for each response token beyond `free_tokens`."""
    free_tokens: NonNegativeInt = 0
    """Response tokens without a penalty."""
    shorter_reward: NonNegativeFloat = 0.0
    """Weight of a reward for being shorter than the other responses to the prompt."""

    @property
    def changes_scores(self) -> bool:
        """Whether the length of a response changes its score."""
        return self.soft_tokens is not None or self.penalty > 0 or self.shorter_reward > 0

    def unused(self) -> Iterator[Problem]:
        if self.soft_tokens is None:
            yield Problem("soft_factor", "algorithm.lengths.soft_tokens is null")
        if not self.penalty:
            yield Problem("free_tokens", "algorithm.lengths.penalty is 0")


class DynamicSamplingConfig(Section):
    """Dynamic sampling: groups whose samples all have the same score give a group estimator no gradient; groups of
    other prompts replace them. A group is judged when it is graded, by the whole score: rewards, their token scores and
    `algorithm.lengths`. What only models of the training step know (`reward_models`, the KL in the reward) cannot be
    combined with it."""

    enabled: bool = False
    """Starts a replacement for each group without signal, so that a step trains `trainer.prompts_per_step` groups with
    signal."""
    min_spread: NonNegativeFloat = 0.0
    """A group has signal if its largest minus its smallest score is more than this."""
    max_groups: PositiveFloat = 3.0
    """Most groups started for a step, in units of `trainer.prompts_per_step`; after that, groups without signal are
    trained on."""

    def unused(self) -> Iterator[Problem]:
        if not self.enabled:
            yield from fields_of(("min_spread", "max_groups"), "algorithm.dynamic_sampling.enabled is false")


class PtxConfig(Section):
    """A supervised loss term in addition to the policy gradient (PPO-ptx, arXiv 2203.02155): reference answers are
    trained on in the same optimizer steps, so that the policy does not forget them."""

    coef: NonNegativeFloat = 0.0
    """Weight of the mean negative log-likelihood (nats per token) of the answers; 0: off."""
    rows_per_update: PositiveInt = 16
    """Answers in each optimizer step; every answer is used once before one is used again."""
    source: str | None = None
    """Data source, in the form of `data.train`; null: the answers of the training prompts."""
    source_options: Options = empty_mapping()
    """Parameters of the source."""
    answer_template: str = "{answer}"
    """Text to train on; `{answer}` and `{any_field_of_the_row}` are filled in."""

    def problems(self) -> Iterator[Problem]:
        if self.source is not None and not self.coef:
            yield Problem("source", f"{self.source!r} has no effect: coef is 0.0")

    def unused(self) -> Iterator[Problem]:
        if not self.coef:
            names = ("rows_per_update", "source_options", "answer_template")
            yield from fields_of(names, "algorithm.ptx.coef is 0")
        elif self.source is None:
            yield Problem("source_options", "algorithm.ptx.source is null")


class DistillationConfig(Section):
    """How the policy learns from `teachers`: on-policy distillation, on the policy's own samples (Agarwal et al.,
    arXiv 2306.13649; Lu et al., On-Policy Distillation, Thinking Machines, 2025)."""

    objective: Literal["sampled", "exact", "top_k"] = "sampled"
    """sampled: each response token has the advantage log p_teacher - log p_policy of the token that was sampled: the
    policy gradient of the reverse KL at that token. Ratio, clipping and correction are those of the algorithm. exact:
    the divergence over the whole vocabulary at each response token is a term of the loss, without ratio; the
    teachers' hidden states travel. top_k: the same over the teacher's `top_k` most probable tokens and all others as
    one more category, a lower bound of it; their ids and log-probs travel, so that the teacher may be a rollout engine
    or a service. With both a row may have one teacher. The default of `rlsdk distill` is `exact`."""
    top_k: PositiveInt = 32
    """The teacher's most probable tokens of objective `top_k`."""
    divergence: Literal["reverse", "forward", "jsd"] = "reverse"
    """Divergence of `exact` and `top_k`. reverse: KL(policy || teacher); forward: KL(teacher || policy); jsd: the
    generalised Jensen-Shannon divergence with `beta`."""
    beta: float = Field(default=0.5, gt=0.0, lt=1.0)
    """Share of the teacher in the mean of `jsd`: beta KL(teacher || mean) + (1 - beta) KL(policy || mean)."""
    coef: NonNegativeFloat = 1.0
    """Factor of the teachers' part of the advantage (sampled) or of the loss (exact, top_k)."""
    reward_coef: NonNegativeFloat = 1.0
    """Factor of the advantage that rewards give; 0: rewards are only measured and logged."""
    sft_coef: NonNegativeFloat = 0.0
    """`rlsdk distill`: weight of the given answers' negative log-likelihood per token, beside the divergence."""

    def unused(self) -> Iterator[Problem]:
        if self.objective == "sampled":
            yield Problem("divergence", "algorithm.distillation.objective is 'sampled'")
        if self.objective == "sampled" or self.divergence != "jsd":
            yield Problem("beta", "only divergence 'jsd' of the objectives 'exact' and 'top_k' reads it")
        if self.objective != "top_k":
            yield Problem("top_k", f"algorithm.distillation.objective is {self.objective!r}")


class AlgorithmConfig(Section):
    """How rewards become a gradient."""

    recipe: str | None = None
    """Recipe whose values are the defaults of these fields, also `--algorithm NAME`; `rlsdk algorithms list` shows
    them."""
    name: str = "policy_gradient"
    """Registered algorithm, `pkg.mod:Class`, or `file.py:Class` (see `rlsdk.interfaces.Algorithm`). policy_gradient is
    composed of the fields below; another algorithm may ignore them."""
    options: Options = empty_mapping()
    """Options of an algorithm of your own (`AlgorithmContext.options`)."""
    roles: tuple[OptionalRole, ...] = empty_tuple()
    """Models that the algorithm needs in addition to those that the fields below need. Set from what your own algorithm
    or estimator declares."""
    advantage: str = "grpo"
    """Registered advantage estimator, `pkg.mod:fn`, or `file.py:fn`."""
    advantage_options: Options = empty_mapping()
    """Keyword arguments of the estimator."""
    loss: str = "ppo_clip"
    """Registered policy loss, `pkg.mod:fn`, or `file.py:fn`."""
    loss_options: Options = empty_mapping()
    """Keyword arguments of the loss, for instance `clip_low` and `clip_high`."""
    loss_aggregation: str = "token_mean"
    """Registered aggregation, or `pkg.mod:fn`, over one mini-batch. token_mean: every response token has the same
    weight (long responses weigh more); sequence_mean: mean over the tokens of a row, then over rows; sequence_sum: sum
    over tokens divided by `rollout.max_response_tokens`, then mean over rows."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL divergence (nats) from the reference policy; 0: no reference model is loaded."""
    kl_estimator: str = "k3"
    """Registered estimator, or `pkg.mod:fn`, of the KL at one token in the loss, from d = log_probs - ref_log_probs: k2
    is d^2/2, k3 is exp(-d) - 1 + d. An estimator whose gradient is not that of a KL (k1) is refused."""
    kl_reward_estimator: str = "k1"
    """Registered estimator, or `pkg.mod:fn`, of the KL at one token in the reward: k1 is d; or those of
    `kl_estimator`."""
    kl_in_reward: bool = False
    """True: subtracts the KL from the tokens' rewards; false: adds it to the loss."""
    kl_target: PositiveFloat | None = None
    """Target KL in nats per token: `kl_coef` is adapted towards it, if the KL is in the reward; null: `kl_coef` is
    constant."""
    kl_horizon: PositiveFloat = 10_000.0
    """Samples after which a KL 20 % off the target has changed `kl_coef` by about 20 %."""
    entropy_coef: float = 0.0
    """Weight of the mean entropy (nats) that is subtracted from the loss."""
    entropy_share: float | None = Field(default=None, gt=0.0, le=1.0)
    """Share of each mini-batch's tokens, those with the highest entropy, that contribute to the loss; null: all."""
    value_clip: PositiveFloat | None = 0.2
    """Clips the change of a value from the old one in the value loss, in units of reward; null: no clip."""
    old_log_probs: Literal["auto", "always", "rollout", "decoupled"] = "auto"
    """Log-probs in the ratio's denominator. auto: recomputed by the train engine, except in steps with one update,
    where they equal the current ones; always: recomputed; rollout: those of the rollout engine; decoupled: recomputed,
    and the ratio to the rollout log-probs is a weight (see `correction`)."""
    correction: CorrectionConfig = CorrectionConfig()
    """Correction for samples from another policy."""
    lengths: LengthConfig = LengthConfig()
    """Effects of a response's length."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    """Replaces groups without signal."""
    distillation: DistillationConfig = DistillationConfig()
    """How the policy learns from `teachers`."""
    ptx: PtxConfig = PtxConfig()
    """A supervised loss term on reference answers."""
    skip_zero_advantage: bool = True
    """Skips rows with advantage 0 in updates if, with this loss and these coefficients, they have no gradient: the same
    update with less computation."""

    def problems(self) -> Iterator[Problem]:
        if self.kl_in_reward and self.kl_coef == 0:
            yield Problem("kl_in_reward", "True needs algorithm.kl_coef above 0, but it is 0.0")
        if self.kl_in_reward and self.dynamic_sampling.enabled and self.name == POLICY_GRADIENT:
            yield Problem(
                "dynamic_sampling.enabled",
                "true cannot be combined with algorithm.kl_in_reward: a group is judged when it is graded, before its "
                "KL is known",
                commands=(
                    Setting("algorithm.kl_in_reward", False),
                    Setting("algorithm.dynamic_sampling.enabled", False),
                ),
            )
        if self.kl_target is not None and not self.kl_in_reward:
            yield Problem(
                "kl_target", f"{self.kl_target} is the target of the KL in the reward; set kl_in_reward true too"
            )
        if choose_old_log_probs(self, stale=False, num_updates=1).corrects_twice:
            yield Problem(
                "correction",
                "needs recomputed log-probs, but old_log_probs is 'rollout', whose ratio holds the sampler's already; "
                "choose 'decoupled'",
            )
