"""Objectives on pairs of a chosen and a rejected response: reward-model training and direct preference optimization.

A pair is two rows of equal `uid`, one with `chosen` True. `pair_weights` gives each pair its weight in the mini-batch.
Then rows may be split into micro-batches and ranks, but not within a pair (`whole_groups`); half a pair is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rlsdk.algorithms.reductions import Groups, response_lengths, valid_rows
from rlsdk.interfaces import Batch, BatchError, ConfigError, ObjectiveResult, nearest


@dataclass(frozen=True, kw_only=True)
class _Loss:
    """What a loss on pairs compares."""

    of_reference: bool
    """Log-probs relative to the reference, or those of the policy alone."""
    per_token: bool
    """The mean over a response's tokens, or their sum."""
    smooths: bool = False
    """Whether it takes `label_smoothing`."""


_LOSSES: Mapping[str, _Loss] = {
    "sigmoid": _Loss(of_reference=True, per_token=False, smooths=True),
    "ipo": _Loss(of_reference=True, per_token=True),
    "hinge": _Loss(of_reference=True, per_token=False),
    "simpo": _Loss(of_reference=False, per_token=True, smooths=True),
    "orpo": _Loss(of_reference=False, per_token=True),
    "cpo": _Loss(of_reference=False, per_token=False, smooths=True),
}
DPO_LOSSES = tuple(_LOSSES)
MAX_MEAN_LOG_PROB = -1e-7
"""Largest mean log-prob of which the odds are computed: at 0 they are infinite, and their gradient is NaN."""


def pair_weights(batch: Batch) -> Batch:
    """Adds `row_weight [B]` float32: 1 / number of pairs in the mini-batch; 0 if a row of the pair is invalid.

    Only pairs without an invalid row are counted.

    Args:
        batch: one whole mini-batch, with `uid` and `chosen`.

    Raises:
        BatchError: a `uid` does not have one chosen and one rejected row; the message names it.
    """
    _check_pairs(batch, torch.ones_like(batch["chosen"]))
    groups = Groups.of(batch)
    whole = groups.sum(valid_rows(batch).long()) == 2
    return batch.with_rows(row_weight=(whole / whole.sum().clamp(min=1)).float()[groups.index])


@dataclass(frozen=True)
class _Pairs:
    """Pairs of a micro-batch with loss."""

    batch: Batch
    groups: Groups
    weight: Tensor
    """`[pairs]`"""

    @classmethod
    def of(cls, batch: Batch) -> _Pairs:
        counted = batch["row_weight"] > 0
        _check_pairs(batch, counted)
        groups = Groups.of(batch)
        # Each of the two rows has the weight of the pair, so the pair's weight is half of their sum.
        return cls(batch, groups, groups.sum(torch.where(counted, batch["row_weight"], 0.0)) / 2)

    def of_chosen(self, per_row: Tensor) -> Tensor:
        """Returns `[pairs]`: the value of the chosen row."""
        return self.groups.sum(torch.where(self.batch["chosen"], per_row, 0.0))

    def of_rejected(self, per_row: Tensor) -> Tensor:
        """Returns `[pairs]`: the value of the rejected row."""
        return self.groups.sum(torch.where(self.batch["chosen"], 0.0, per_row))

    def weighed(self, per_pair: Tensor) -> Tensor:
        """Returns a scalar: the sum of a value per pair times the weight of the pair."""
        return (torch.where(self.weight > 0, per_pair, 0.0) * self.weight).sum()


def _check_pairs(batch: Batch, counted: Tensor) -> None:
    groups, chosen = Groups.of(batch), batch["chosen"]
    better, worse = groups.sum((counted & chosen).long()), groups.sum((counted & ~chosen).long())
    wrong = ((better != worse) | (better > 1)).nonzero()[:, 0]
    if len(wrong):
        at = int(wrong[0])
        uid = int(batch["uid"][groups.index == at][0])
        raise BatchError(
            f"uid {uid}: expected one chosen and one rejected row, got {int(better[at])} and {int(worse[at])}; "
            "this objective needs whole pairs in every mini-batch and micro-batch (whole_groups)"
        )


@dataclass(frozen=True, kw_only=True)
class RewardModelObjective:
    """`-log sigmoid(s_chosen - s_rejected - margin)`, mean over pairs: the Bradley-Terry model.

    Ouyang et al. 2022 (arXiv 2203.02155), equation 1; with the margin of Llama 2 (Touvron et al. 2023, arXiv
    2307.09288, equation 2), read from the chosen row's `margin` if the batch has it. The scores come from a model with
    a score head, at each row's last token.

    The engine must keep the two rows of a `uid` in one micro-batch.

    Metrics, means over `metric_weight`: `accuracy` (the chosen row scores higher), `score_margin`, `score` (of both
    rows); and `preference_loss`.
    """

    center_coef: float = 0.0
    """Weight of `(s_chosen + s_rejected)^2`, which keeps the scores around 0 (Eisenstein et al. 2023, arXiv
    2312.09244)."""
    whole_groups: bool = True

    @property
    def outputs(self) -> Sequence[str]:
        return ("scores",)

    @property
    def fields(self) -> Sequence[str]:
        return ("uid", "chosen", "row_weight", "margin")

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        pairs = _Pairs.of(batch)
        scores = torch.where(batch["row_weight"] > 0, outputs["scores"], 0.0)
        chosen, rejected = pairs.of_chosen(scores), pairs.of_rejected(scores)
        difference = chosen - rejected
        margin = pairs.of_chosen(batch["margin"]) if "margin" in batch else torch.zeros_like(difference)
        loss = pairs.weighed(-F.logsigmoid(difference - margin))
        if self.center_coef:
            loss = loss + self.center_coef * pairs.weighed((chosen + rejected).square())
        with torch.no_grad():
            sums = {
                "loss_weight": pairs.weight.sum(),
                "metric_weight": pairs.weight.sum(),
                "preference_loss": loss.detach(),
                "accuracy": pairs.weighed((difference > 0).float()),
                "score_margin": pairs.weighed(difference),
                "score": pairs.weighed((chosen + rejected) / 2),
            }
        return ObjectiveResult(loss=loss, sums=sums)


@dataclass(frozen=True, kw_only=True)
class DpoObjective:
    """Direct preference optimization and its relatives, mean over pairs.

    With a reference, `r = sum over the response of log p/ref` and `h = r_chosen - r_rejected`:

    - `sigmoid`: `-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)`: DPO (Rafailov et al. 2023, arXiv 2305.18290,
      equation 7); e = `label_smoothing`: conservative DPO (Mitchell 2023).
    - `ipo`: `(h - 1 / (2 beta))^2`: IPO (Azar et al. 2023, arXiv 2310.12036, equation 17, tau = beta), with log-probs
      averaged over the response's tokens, as in TRL, whose developers asked the authors.
    - `hinge`: `max(0, 1 - beta h)`: SLiC (Zhao et al. 2023, arXiv 2305.10425).

    Without a reference:

    - `simpo`: as `sigmoid` with `r = mean over the response of log p` and `beta h - target_margin` in place of
      `beta h`: SimPO (Meng et al. 2024, arXiv 2405.14734, equation 6; gamma = `target_margin`).
    - `orpo`: `-beta log sigmoid(log odds_chosen - log odds_rejected)`, `odds = P / (1 - P)`, `log P = mean over the
      response of log p`: the odds-ratio term of ORPO (Hong et al. 2024, arXiv 2403.07691, equations 6 and 7, lambda =
      beta). The paper adds it to the supervised loss: `sft_coef` 1.
    - `cpo`: as `sigmoid` with `r = sum over the response of log p`: CPO (Xu et al. 2024, arXiv 2401.08417, equation
      3). The paper adds the supervised loss: `sft_coef` 1.

    All of them depend only on differences. So the chosen answer may become less likely, as long as the rejected one
    falls faster, especially if the two share most tokens (Pal et al. 2024, arXiv 2402.13228). To prevent this,
    `sft_coef` adds `-sft_coef * mean log p` of the chosen answer's tokens: Pang et al. 2024 (arXiv 2404.19733,
    equation 1), and 0.2 in Llama 3 (arXiv 2407.21783, section 4.1.4). The supervised loss is over the answer's tokens;
    that of TRL's ORPO is over the prompt's, too.

    The engine must keep the two rows of a `uid` in one micro-batch.

    Metrics, means over `metric_weight`: `accuracy` (h > 0), `reward_margin` (beta h), `chosen_reward`,
    `rejected_reward` (beta r), `chosen_nll` (per token); `preference_loss`, and `sft_loss` with `sft_coef`. For `orpo`,
    whose beta is a weight of the loss, they have the same form.

    Raises:
        ConfigError: the loss is unknown, beta is not above 0, `sft_coef` or `target_margin` is negative, or label
            smoothing is outside [0, 0.5) or used with a loss that has none.
    """

    loss: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    """Assumed share of pairs with wrong labels, in [0, 0.5)."""
    sft_coef: float = 0.0
    """Weight of the chosen answer's negative log-likelihood per token."""
    target_margin: float = 0.0
    """`simpo`: margin by which the reward of the chosen answer should be higher."""
    whole_groups: bool = True

    def __post_init__(self) -> None:
        if self.loss not in DPO_LOSSES:
            raise ConfigError(f"DPO loss {self.loss!r}{nearest(self.loss, DPO_LOSSES)}; choose one of {DPO_LOSSES}")
        if not self.beta > 0:
            raise ConfigError(f"DPO beta is {self.beta!r}: expected a number above 0, such as 0.1")
        smooth = [name for name, loss in _LOSSES.items() if loss.smooths]
        if not 0 <= self.label_smoothing < 0.5 or (self.label_smoothing and self.loss not in smooth):
            raise ConfigError(
                f"DPO label_smoothing is {self.label_smoothing!r} with loss {self.loss!r}: "
                f"expected a number in [0, 0.5), above 0 with {smooth} only"
            )
        for name, least in (("sft_coef", self.sft_coef), ("target_margin", self.target_margin)):
            if not least >= 0:
                raise ConfigError(f"DPO {name} is {least!r}: expected a number of at least 0, such as 0.2")

    @property
    def outputs(self) -> Sequence[str]:
        return ("log_probs",)

    @property
    def fields(self) -> Sequence[str]:
        reference = ("ref_log_probs",) if _LOSSES[self.loss].of_reference else ()
        return ("response_mask", *reference, "uid", "chosen", "row_weight")

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        pairs, mask = _Pairs.of(batch), batch["response_mask"] & (batch["row_weight"] > 0)[batch.row_of_token]
        num_tokens = response_lengths(batch).clamp(min=1)
        kind = _LOSSES[self.loss]
        per_token = outputs["log_probs"] - batch["ref_log_probs"] if kind.of_reference else outputs["log_probs"]
        value = batch.row_sum(torch.where(mask, per_token, 0.0))
        if kind.per_token:
            value = value / num_tokens
        chosen, rejected = pairs.of_chosen(value), pairs.of_rejected(value)
        loss = preference_loss = pairs.weighed(self._per_pair(chosen, rejected))
        nll = pairs.weighed(-pairs.of_chosen(batch.row_sum(torch.where(mask, outputs["log_probs"], 0.0)) / num_tokens))
        if self.sft_coef:
            loss = preference_loss + self.sft_coef * nll
        with torch.no_grad():
            sums = {
                "loss_weight": pairs.weight.sum(),
                "metric_weight": pairs.weight.sum(),
                "preference_loss": preference_loss.detach(),
                "accuracy": pairs.weighed((chosen > rejected).float()),
                "reward_margin": pairs.weighed(self.beta * (chosen - rejected)),
                "chosen_reward": pairs.weighed(self.beta * chosen),
                "rejected_reward": pairs.weighed(self.beta * rejected),
                "chosen_nll": nll.detach(),
                **({"sft_loss": self.sft_coef * nll.detach()} if self.sft_coef else {}),
            }
        return ObjectiveResult(loss=loss, sums=sums)

    def _per_pair(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        difference = chosen - rejected
        match self.loss:
            case "ipo":
                return (difference - 1 / (2 * self.beta)).square()
            case "hinge":
                return (1 - self.beta * difference).relu()
            case "orpo":
                return -self.beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))
        margin = self.beta * difference - (self.target_margin if self.loss == "simpo" else 0.0)
        right, wrong = F.logsigmoid(margin), F.logsigmoid(-margin)
        return -(1 - self.label_smoothing) * right - self.label_smoothing * wrong


def _log_odds(log_prob: Tensor) -> Tensor:
    """`log(P / (1 - P))` of `log P`."""
    log_prob = log_prob.clamp(max=MAX_MEAN_LOG_PROB)
    return log_prob - torch.log(-torch.expm1(log_prob))
