"""The policy's objective: a registered loss, with KL penalty, entropy bonus and off-policy correction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from rlsdk.algorithms.kl import LOSS_ESTIMATOR, k3, loss_kl_estimator
from rlsdk.algorithms.named import resolve
from rlsdk.interfaces import Batch, KlEstimator, ObjectiveResult, PolicyLoss, PolicyLossInputs, Reads, reads_of


@dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """Policy gradient with optional KL penalty and entropy bonus.

    `sum(w * (c * loss + kl_coef * kl - entropy_coef * entropy + divergence_coef * d * divergence))` over response
    tokens: w = `loss_weight`, d = `teacher_weight`, c = `rollout_weight` if the batch has it (see
    `rlsdk.algorithms.correction`), else 1. Values outside of the mask are ignored, even NaN.

    Reads `response_mask`, `loss_weight`, `advantages`; `ref_log_probs` with a KL penalty; and the fields that the loss
    declares. Without `old_log_probs` the batch counts as on-policy: the current log-probs replace them, and the ratio
    is exactly 1. With `rollout_log_probs` it also reports the difference between the current policy and the one that
    sampled; in the first update of a step, this is the difference between the two engines.

    `sums`: `policy_loss`, `kl_loss` and `entropy_loss` add up to the loss. All other metrics are weighted sums; divide
    by `metric_weight` for the mean (as `rlsdk.algorithms.update_means` does). The weight of a metric is `loss_weight`.
    If samples without advantage may be left out of the update (`zero_without_advantage`), it is 0 on them, so that the
    means do not depend on whether they were left out. `maxima` are over the same tokens. Where samples have several
    rows, `has_advantage` says which ones these are.
    """

    loss: str | PolicyLoss = "rlsdk.algorithms.losses:ppo_clip"
    """`package.module:function`, or a function that can be pickled."""
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the loss."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference policy in the loss."""
    kl_estimator: str | KlEstimator = LOSS_ESTIMATOR
    """A name of `rlsdk.algorithms.kl.KL_ESTIMATORS`, `package.module:function`, or a function that can be pickled. One
    whose gradient is not that of a KL (k1) is refused."""
    divergence_coef: float = 0.0
    """Weight of the divergence from a teacher; other than 0 needs `Capability.DISTILLATION`, and a batch with
    `teacher_weight`, and with `teacher_states`, or `teacher_top_ids` and `teacher_top_log_probs`; with `teacher_index`
    where rows differ in their teacher. It has no ratio and no correction."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; other than 0 needs `Capability.ENTROPY`."""
    on_policy: bool = False
    """The current weights are those of `old_log_probs`: the current log-probs replace them, and the batch may lack
    them. True for the first update of a step."""
    several_rows: bool = False
    """Samples of the batch have several rows. It then reads `has_advantage`, and keeps the rows of a sample in one
    micro-batch if the loss asks for it (`PolicyLoss.whole_samples`)."""

    def __post_init__(self) -> None:
        if self.kl_coef:
            loss_kl_estimator(self.kl_estimator)

    @property
    def outputs(self) -> Sequence[str]:
        """Model outputs that it needs."""
        entropy = ("entropy",) if self.entropy_coef else ()
        divergence = ("divergence",) if self.divergence_coef else ()
        return tuple(dict.fromkeys(("log_probs", *entropy, *divergence, *self._reads.outputs)))

    @property
    def fields(self) -> Sequence[str]:
        """Batch fields that it reads; `old_log_probs`, `rollout_log_probs` and `rollout_weight` may be absent, and of a
        teacher those that it does not give."""
        base = ("response_mask", "loss_weight", "advantages", "old_log_probs", "rollout_log_probs", "rollout_weight")
        ref = ("ref_log_probs",) if self.kl_coef else ()
        given = ("teacher_states", "teacher_top_ids", "teacher_top_log_probs", "teacher_index")
        teacher = (*given, "teacher_weight") if self.divergence_coef else ()
        group = ("uid",) if self.whole_groups else ()
        sample = ("uid", "sample", "has_advantage") if self.several_rows else ()
        return tuple(dict.fromkeys((*base, *ref, *teacher, *group, *sample, *self._reads.fields)))

    @property
    def whole_groups(self) -> bool:
        """Whether all rows of a `uid` must be in one micro-batch. With `whole_samples`, those of a sample suffice."""
        return self.whole_samples or self._compares_samples

    @property
    def whole_samples(self) -> bool:
        """Whether it is enough that all rows of a sample are in one micro-batch."""
        needs = self.several_rows and bool(getattr(self._loss_fn, "whole_samples", False))
        return needs and not self._compares_samples

    @property
    def zero_without_advantage(self) -> bool:
        """Whether tokens of advantage 0 have no gradient, so that rows with only such tokens can be left out."""
        others = self.kl_coef or self.entropy_coef or self.divergence_coef
        return not others and getattr(self._loss_fn, "zero_without_advantage", False)

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        inputs = self._inputs(outputs, batch)
        weight = torch.where(inputs.mask, batch["loss_weight"], 0.0)
        observed = self._metric_weight(inputs, weight)
        per_token, metrics = self._loss_fn(inputs, **self.loss_options)
        correction = batch.tokens.get("rollout_weight")
        if correction is not None:
            per_token = per_token * torch.where(inputs.mask, correction, 0.0)
        loss = _weighed(per_token, inputs.mask, weight)
        sums = {name: _weighed(values.detach(), inputs.mask, observed) for name, values in metrics.items()}
        sums |= {"loss_weight": weight.sum(), "metric_weight": observed.sum(), "policy_loss": loss.detach()}
        if self.kl_coef:
            reference = torch.where(inputs.mask, batch["ref_log_probs"], 0.0)
            kl = loss_kl_estimator(self.kl_estimator)(inputs.log_probs, reference)
            penalty = self.kl_coef * _weighed(kl, inputs.mask, weight)
            loss = loss + penalty
            sums |= {"kl_loss": penalty.detach(), "kl": _weighed(kl.detach(), inputs.mask, observed)}
        if inputs.entropy is not None:
            sums["entropy"] = _weighed(inputs.entropy.detach(), inputs.mask, observed)
        if self.entropy_coef and inputs.entropy is not None:
            bonus = -self.entropy_coef * _weighed(inputs.entropy, inputs.mask, weight)
            loss = loss + bonus
            sums["entropy_loss"] = bonus.detach()
        if self.divergence_coef:
            apart = self.divergence_coef * _weighed(
                outputs["divergence"], inputs.mask, weight * batch["teacher_weight"]
            )
            loss = loss + apart
            sums["divergence_loss"] = apart.detach()
        seen = inputs.mask & (observed != 0)
        current = inputs.log_probs.detach()
        maxima = {"log_ratio": _largest((current - inputs.old_log_probs).abs(), seen)}
        if "rollout_log_probs" in batch:
            rollout = torch.where(inputs.mask, batch["rollout_log_probs"], 0.0)
            difference = (current - rollout).abs()
            sums["rollout_difference"] = _weighed(difference, inputs.mask, observed)
            sums["rollout_kl"] = _weighed(k3(rollout, current), inputs.mask, observed)
            maxima["rollout_difference"] = _largest(difference, seen)
        return ObjectiveResult(loss=loss, sums=sums, maxima=maxima)

    def _inputs(self, outputs: Mapping[str, Tensor], batch: Batch) -> PolicyLossInputs:
        """Returns the inputs of the loss, set to 0 outside of the mask, so that no gradient or NaN comes from there."""
        mask = batch["response_mask"]
        log_probs = torch.where(mask, outputs["log_probs"], 0.0)
        current = log_probs.detach()
        old = current if self.on_policy else torch.where(mask, batch.tokens.get("old_log_probs", current), 0.0)
        return PolicyLossInputs(
            log_probs=log_probs,
            old_log_probs=old,
            advantages=torch.where(mask, batch["advantages"], 0.0),
            mask=mask,
            batch=batch,
            entropy=torch.where(mask, outputs["entropy"], 0.0) if "entropy" in self.outputs else None,
        )

    def _metric_weight(self, inputs: PolicyLossInputs, weight: Tensor) -> Tensor:
        """Returns `[N]`: the weight of each token in the metrics (see the class)."""
        if not self.zero_without_advantage:
            return weight
        batch = inputs.batch
        if self.several_rows:
            has_advantage = batch["has_advantage"]
        else:
            has_advantage = batch.row_sum((inputs.advantages != 0).float()) > 0
        return torch.where(has_advantage[batch.row_of_token], weight, 0.0)

    @property
    def _compares_samples(self) -> bool:
        """Whether the loss compares the samples of a prompt."""
        return bool(getattr(self._loss_fn, "whole_groups", False))

    @property
    def _loss_fn(self) -> PolicyLoss:
        return cast(PolicyLoss, resolve(self.loss, "policy loss")) if isinstance(self.loss, str) else self.loss

    @property
    def _reads(self) -> Reads:
        """Fields and outputs that the loss and the KL estimator declare."""
        declared = reads_of(self._loss_fn)
        if self.kl_coef:
            of_kl = reads_of(loss_kl_estimator(self.kl_estimator))
            declared = replace(declared, fields=(*declared.fields, *of_kl.fields))
        return declared


def _weighed(per_token: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    return (torch.where(mask, per_token, 0.0) * weight).sum()


def _largest(values: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, values, 0.0).max() if len(values) else values.new_zeros(())
