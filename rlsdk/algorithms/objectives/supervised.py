"""Supervised training on given tokens: fine-tuning, and the pretraining term of an RL update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsdk.interfaces import Batch, ObjectiveResult


@dataclass(frozen=True, kw_only=True)
class SftObjective:
    """`coef` times the negative log-likelihood of the tokens under `response_mask`, weighted by `loss_weight`.

    To use it as the pretraining term of PPO-ptx (Ouyang et al. 2022, arXiv 2203.02155, equation 2), call
    `forward_backward` with both objectives, each on its own batch, then `optim_step` once; the gradients add up.

    Metrics: `nll` (mean over `metric_weight`), `sft_loss`.
    """

    coef: float = 1.0
    """Weight of the whole term."""
    whole_groups: bool = False

    @property
    def outputs(self) -> Sequence[str]:
        return ("log_probs",)

    @property
    def fields(self) -> Sequence[str]:
        return ("response_mask", "loss_weight")

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        mask = batch["response_mask"]
        weight = torch.where(mask, batch["loss_weight"], 0.0)
        nll = -(torch.where(mask, outputs["log_probs"], 0.0) * weight).sum()
        loss = self.coef * nll
        sums = {"loss_weight": weight.sum(), "metric_weight": weight.sum(), "nll": nll.detach()}
        return ObjectiveResult(loss=loss, sums={**sums, "sft_loss": loss.detach()})


@dataclass(frozen=True, kw_only=True)
class DistillObjective:
    """Knowledge distillation on given answers (Hinton et al. 2015, arXiv 1503.02531).

    `coef` times the divergence of the model's distribution of each token under `response_mask` from its teacher's,
    weighted by `teacher_weight`, and `sft_coef` times the token's negative log-likelihood; both weighted by
    `loss_weight`.

    With `sampled` the divergence is log p_teacher - log p_model of the given token: where these are the teacher's own
    samples, its mean estimates the forward KL(teacher || model), and its gradient is that of the negative
    log-likelihood. Otherwise the output `divergence` is over the whole vocabulary (the batch has `teacher_states`), or
    over the teacher's top tokens and all others as one (`teacher_top_ids`, `teacher_top_log_probs`).

    Sums for metrics: `divergence` over `teacher_weight`, `nll` over `metric_weight`; `sft_loss`.
    """

    coef: float = 1.0
    sft_coef: float = 0.0
    sampled: bool = False
    whole_groups: bool = False

    @property
    def outputs(self) -> Sequence[str]:
        return ("log_probs",) if self.sampled else ("log_probs", "divergence")

    @property
    def fields(self) -> Sequence[str]:
        top = ("teacher_top_ids", "teacher_top_log_probs", "teacher_index")
        given = ("teacher_log_probs",) if self.sampled else ("teacher_states", *top)
        return ("response_mask", "loss_weight", "teacher_weight", *given)

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        mask = batch["response_mask"]
        weight = torch.where(mask, batch["loss_weight"], 0.0)
        taught = weight * batch["teacher_weight"]
        apart = batch["teacher_log_probs"] - outputs["log_probs"] if self.sampled else outputs["divergence"]
        divergence = (torch.where(taught > 0, apart, 0.0) * taught).sum()
        nll = -(torch.where(mask, outputs["log_probs"], 0.0) * weight).sum()
        loss = self.coef * divergence + self.sft_coef * nll
        return ObjectiveResult(
            loss=loss,
            sums={
                "loss_weight": weight.sum(),
                "metric_weight": weight.sum(),
                "teacher_weight": taught.sum(),
                "divergence": divergence.detach(),
                "nll": nll.detach(),
                "sft_loss": loss.detach(),
            },
        )
