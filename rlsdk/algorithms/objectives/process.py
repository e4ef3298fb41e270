"""The objective of a process reward model: labels at the ends of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rlsdk.interfaces import Batch, ObjectiveResult


def step_weights(batch: Batch) -> Batch:
    """Adds `step_weight [N]` float32: 1 / number of labelled steps of the mini-batch at each of their tokens, else 0.

    Args:
        batch: one whole mini-batch, with `step_labels`, NaN where no labelled step ended.
    """
    labelled = batch["step_labels"].isfinite()
    return batch.with_tokens(step_weight=labelled.float() / labelled.sum().clamp(min=1))


@dataclass(frozen=True, kw_only=True)
class ProcessRewardObjective:
    """Binary cross-entropy of the labels of steps, hard or soft, mean over labelled steps.

    With `p = sigmoid(value)`, where the value is that of the token after the step's end, which is computed from the
    hidden state of the step's last token: `-(y log p + (1 - y) log (1 - p))`: Lightman et al. 2023 (arXiv 2305.20050)
    and Math-Shepherd (Wang et al. 2024, arXiv 2312.08935, equation 2; `y` in [0, 1] is its soft estimation).

    Metrics, means over `metric_weight`: `accuracy` (p and label are on the same side of 1/2), `score` (p), `label`;
    `step_loss`.
    """

    whole_groups: bool = False

    @property
    def outputs(self) -> Sequence[str]:
        return ("values",)

    @property
    def fields(self) -> Sequence[str]:
        return ("step_labels", "step_weight")

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        weight = batch["step_weight"]
        counted = weight > 0
        labels = torch.where(counted, batch["step_labels"], 0.0)
        values = torch.where(counted, outputs["values"], 0.0)
        loss = (weight * F.binary_cross_entropy_with_logits(values, labels, reduction="none")).sum()
        with torch.no_grad():
            sums = {
                "loss_weight": weight.sum(),
                "metric_weight": weight.sum(),
                "step_loss": loss.detach(),
                "accuracy": (weight * ((values > 0) == (labels > 0.5))).sum(),
                "score": (weight * values.sigmoid()).sum(),
                "label": (weight * labels).sum(),
            }
        return ObjectiveResult(loss=loss, sums=sums)
