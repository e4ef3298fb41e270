"""Objectives: what a train engine differentiates. Picklable, engine-blind, and additive over any cut of the rows."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from rlsdk.algorithms.kl import k3, kl_estimator
from rlsdk.interfaces import Batch, ConfigError, ObjectiveResult, PolicyLoss, PolicyLossInputs


@functools.cache
def _resolve(path: str) -> PolicyLoss:
    module, _, name = path.partition(":")
    try:
        return cast(PolicyLoss, getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"policy loss {path!r} cannot be loaded: {error}; name it as 'package.module:function'"
        ) from error


def _largest(values: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, values, 0.0).max() if len(values) else values.new_zeros(())


@dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """Policy gradient with optional KL penalty and entropy bonus.

    `sum(w * (loss + kl_coef * kl - entropy_coef * entropy))` over response tokens, w = `loss_weight`.

    Reads `response_mask`, `loss_weight`, `advantages`; `ref_log_probs` with a KL penalty. Without `old_log_probs` the
    batch is taken to be on-policy: the current log-probs stand in, and the ratio is exactly 1. With
    `rollout_log_probs` it also reports how far the current policy is from the one that sampled: in the first update of
    a step, how far the two engines are apart.

    Metrics in `sums` are weighed with `loss_weight`; divide by the sum of `loss_weight`, which is among them, for the
    mean (it is 1 for the mean aggregations). `maxima` are over response tokens.
    """

    loss: str | PolicyLoss = "rlsdk.algorithms.losses:ppo_clip"
    """`package.module:function`, or a function that can be pickled."""
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the loss."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference policy in the loss."""
    kl_estimator: str = "k3"
    """A name of `rlsdk.algorithms.kl.KL_ESTIMATORS`."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; other than 0 needs `Capability.ENTROPY`."""
    on_policy: bool = False
    """The weights are those that `old_log_probs` stand for: the current log-probs are taken for them, and rows may
    leave them out. True for the first update of a step."""

    @property
    def outputs(self) -> Sequence[str]:
        return ("log_probs", "entropy") if self.entropy_coef else ("log_probs",)

    @property
    def zero_without_advantage(self) -> bool:
        """Tokens of advantage 0 have no gradient: their rows can be left out, the weights of the others unchanged."""
        return not (self.kl_coef or self.entropy_coef) and getattr(self._loss_fn, "zero_without_advantage", False)

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        mask, weight = batch["response_mask"], batch["loss_weight"]
        log_probs = outputs["log_probs"]
        current = log_probs.detach()
        old = current if self.on_policy else batch.tokens.get("old_log_probs", current)

        def weighed(per_token: Tensor) -> Tensor:
            return (torch.where(mask, per_token, 0.0) * weight).sum()

        inputs = PolicyLossInputs(
            log_probs=log_probs, old_log_probs=old, advantages=batch["advantages"], mask=mask, batch=batch
        )
        per_token, metrics = self._loss_fn(inputs, **self.loss_options)
        loss = weighed(per_token)
        sums = {"loss_weight": weight.sum(), "policy_loss": loss.detach()}
        sums |= {name: weighed(values.detach()) for name, values in metrics.items()}
        maxima = {"log_ratio": _largest((current - old).abs(), mask)}
        if self.kl_coef:
            kl = weighed(kl_estimator(self.kl_estimator)(log_probs, batch["ref_log_probs"]))
            loss = loss + self.kl_coef * kl
            sums["kl"] = kl.detach()
        if self.entropy_coef:
            entropy = weighed(outputs["entropy"])
            loss = loss - self.entropy_coef * entropy
            sums["entropy"] = entropy.detach()
        if "rollout_log_probs" in batch:
            rollout = batch["rollout_log_probs"]
            difference = (current - rollout).abs()
            sums |= {"rollout_difference": weighed(difference), "rollout_kl": weighed(k3(rollout, current))}
            maxima["rollout_difference"] = _largest(difference, mask)
        return ObjectiveResult(loss=loss, sums=sums, maxima=maxima)

    @property
    def _loss_fn(self) -> PolicyLoss:
        return _resolve(self.loss) if isinstance(self.loss, str) else self.loss


@dataclass(frozen=True, kw_only=True)
class SftObjective:
    """Negative log-likelihood of the tokens under `response_mask`, weighed with `loss_weight`."""

    @property
    def outputs(self) -> Sequence[str]:
        return ("log_probs",)

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        weight = batch["loss_weight"]
        loss = -(torch.where(batch["response_mask"], outputs["log_probs"], 0.0) * weight).sum()
        return ObjectiveResult(loss=loss, sums={"loss_weight": weight.sum(), "nll": loss.detach()})
