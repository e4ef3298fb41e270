"""Kahneman-Tversky optimization: an objective on answers that are labelled one by one, without pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rlsdk.interfaces import Batch, ConfigError, ObjectiveResult


def mean_log_ratio(batch: Batch, log_probs: Tensor) -> float:
    """Mean over rows of `log p/ref` of the response.

    Args:
        batch: rows with `response_mask` and `ref_log_probs`.
        log_probs: flat `[N]`, of the policy.
    """
    if not batch.num_rows:
        return 0.0
    ratio = torch.where(batch["response_mask"], log_probs.double() - batch["ref_log_probs"].double(), 0.0)
    return float(batch.row_sum(ratio).mean())


def label_weights(batch: Batch) -> Batch:
    """Adds `row_weight [B]` float32: 1 / number of rows. `batch` is one whole mini-batch."""
    return batch.with_rows(row_weight=torch.full((batch.num_rows,), 1.0 / max(batch.num_rows, 1)))


@dataclass(frozen=True, kw_only=True)
class KtoObjective:
    """KTO (Ethayarajh et al. 2024, arXiv 2402.01306, equations 7 and 8), mean over rows.

    With `r = log p/ref`, summed over the response, and `z = max(0, log_ratio_estimate)`:

    - desirable rows (`chosen`): `desirable_weight * (1 - sigmoid(beta (r - z)))`;
    - undesirable rows: `undesirable_weight * (1 - sigmoid(beta (z - r)))`.

    `z` estimates KL(policy || reference). The paper takes it from prompts with answers to other prompts of the same
    mini-batch: `mean_log_ratio` of such rows is the row field `log_ratio_estimate`, equal on all rows, so it does not
    depend on how rows are split. No gradient flows through it.

    Metrics, means over `metric_weight`: `accuracy` (desirable rows with r > z, undesirable ones with r < z), `kl` (z),
    `reward_margin` (beta times the mean of r - z on desirable rows, and of z - r on undesirable ones);
    `preference_loss`.

    Raises:
        ConfigError: beta is not above 0, or a weight is negative.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    """Lambda_D of the paper."""
    undesirable_weight: float = 1.0
    """Lambda_U of the paper."""
    whole_groups: bool = False

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ConfigError(f"KTO beta is {self.beta!r}: expected a number above 0, such as 0.1")
        for name in ("desirable_weight", "undesirable_weight"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"KTO {name} is {getattr(self, name)!r}: expected a number of at least 0, such as 1")

    @property
    def outputs(self) -> Sequence[str]:
        return ("log_probs",)

    @property
    def fields(self) -> Sequence[str]:
        return ("response_mask", "ref_log_probs", "chosen", "row_weight", "log_ratio_estimate")

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        weight, desirable = batch["row_weight"], batch["chosen"]
        mask = batch["response_mask"] & (weight > 0)[batch.row_of_token]
        ratio = batch.row_sum(torch.where(mask, outputs["log_probs"] - batch["ref_log_probs"], 0.0))
        divergence = batch["log_ratio_estimate"].clamp(min=0)
        ahead = torch.where(desirable, ratio - divergence, divergence - ratio)
        weights = ratio.new_tensor([self.undesirable_weight, self.desirable_weight])
        loss = (weight * weights[desirable.long()] * (1 - F.sigmoid(self.beta * ahead))).sum()
        with torch.no_grad():
            sums = {
                "loss_weight": weight.sum(),
                "metric_weight": weight.sum(),
                "preference_loss": loss.detach(),
                "accuracy": (weight * (ahead > 0)).sum(),
                "kl": (weight * divergence).sum(),
                "reward_margin": (weight * self.beta * ahead).sum(),
            }
        return ObjectiveResult(loss=loss, sums=sums)
