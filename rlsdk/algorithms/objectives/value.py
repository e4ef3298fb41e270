"""The critic's objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsdk.interfaces import Batch, ConfigError, ObjectiveResult


@dataclass(frozen=True, kw_only=True)
class ValueObjective:
    """Half the squared error of values against `returns`, weighted by `loss_weight`:
    `sum(w * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2)`.

    Clipped as in OpenAI's PPO (Schulman et al. 2017, and its code `ppo2`); the factor 1/2 is as in verl and TRL. With
    `clip` None the old values are not read. Mask and weights are those of the policy's loss.

    Metrics, means over `metric_weight`: `value`, `return`, `return_squared`, `value_error`, `value_error_squared` (for
    `explained_variance`), `value_clip_fraction` (where the clip removed the gradient); and `value_loss`.

    Raises:
        ConfigError: `clip` is not above 0.
    """

    clip: float | None = 0.2
    """Maximum change of a value from the old one, beyond which its gradient is clipped, in units of reward; None: no
    clip."""
    whole_groups: bool = False

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"value clip is {self.clip!r}: expected a number above 0, such as 0.2, or None")

    @property
    def outputs(self) -> Sequence[str]:
        return ("values",)

    @property
    def fields(self) -> Sequence[str]:
        return ("response_mask", "loss_weight", "returns", *(() if self.clip is None else ("values",)))

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        mask = batch["response_mask"]
        weight = torch.where(mask, batch["loss_weight"], 0.0)
        values, returns = torch.where(mask, outputs["values"], 0.0), torch.where(mask, batch["returns"], 0.0)
        error, is_cut = (values - returns).square(), torch.zeros_like(mask)
        if self.clip is not None:
            old = torch.where(mask, batch["values"], 0.0)
            clipped = (values.clamp(old - self.clip, old + self.clip) - returns).square()
            is_cut = clipped > error
            error = torch.maximum(error, clipped)
        loss = 0.5 * (error * weight).sum()
        plain = (values - returns).detach()
        metrics = {
            "value": values.detach(),
            "return": returns,
            "return_squared": returns.square(),
            "value_error": plain,
            "value_error_squared": plain.square(),
            "value_clip_fraction": is_cut.float(),
        }
        sums = {name: (number * weight).sum() for name, number in metrics.items()}
        sums |= {"loss_weight": weight.sum(), "metric_weight": weight.sum(), "value_loss": loss.detach()}
        return ObjectiveResult(loss=loss, sums=sums, maxima={"value_error": plain.abs().max() if len(plain) else 0.0})


def explained_variance(means: Mapping[str, float]) -> float:
    """Returns the share of the returns' variance that the critic explains: `1 - var(V - R) / var(R)`.

    Args:
        means: metrics of `ValueObjective` as means.

    Returns:
        1 is perfect, 0 no better than a constant; NaN if all returns are equal.
    """
    variance = means["return_squared"] - means["return"] ** 2
    if not variance > 0:
        return float("nan")
    return 1 - (means["value_error_squared"] - means["value_error"] ** 2) / variance
