"""Requirements: hidden states of a teacher, and the divergence from it over the whole vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import Batch, Capability
from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.cases import PLAIN_TEACHER, Weighted, train_batch
from rlsdk.testing.train.lab import TrainLab
from rlsdk.testing.train.plain_steps import plain_model_of
from rlsdk.testing.train.requirements.outputs import forward_all

TEMPERATURE = 1.6
"""Of the teacher."""
SHARES = (0.0, 0.4, 1.0)
"""Shares of the teacher in the mean: forward KL, Jensen-Shannon, reverse KL."""


class DistillationRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("distillation.hidden_states", needs=Capability.DISTILLATION, since=(2, 1))
    def test_distillation_hidden_states(self, lab: TrainLab, measured: Measured) -> None:
        """Hidden states at t are those of which the logits of token t are made: float32, 0 off the mask."""
        case = lab.case(optim=None)
        batch = train_batch(seed=3, masked=True)
        (found,) = lab.run(forward_all, case, [(batch, ("hidden_states", "log_probs"))])
        expected = plain_states(plain_model_of(case), batch)[0] * batch["response_mask"][:, None]
        assert found["hidden_states"].dtype is torch.float32
        assert found["hidden_states"].shape == expected.shape
        worst = float((found["hidden_states"] - expected).abs().max())
        measured.at_most("largest difference of hidden states", worst, 10 * lab.suite.tolerance)

    @requirement("distillation.divergence", needs=Capability.DISTILLATION, since=(2, 1))
    def test_distillation_divergence(self, lab: TrainLab, measured: Measured) -> None:
        """Loss, gradient and weights with a divergence in the loss are those of plain torch with the logits of both
        models, with one rank and with several, and in micro-batches; the teacher has a vocabulary and a head of its
        own."""
        teacher = lab.variant("capped") or lab.variant("other") or lab.model
        plain = plain_model_of(lab.case(model=teacher))
        objective = Weighted(("log_probs", "divergence"))
        for share in SHARES:
            steps = [[taught(train_batch(seed=50 + at, masked=True), plain, share)] for at in range(2)]
            more: dict[str, Any] = {"steps": steps, "objective": objective, "teacher": teacher, "witness": False}
            case = lab.case(**more)
            lab.holds_to_plain(measured, [lab.drive(**more)], case, f"share {share}")
            lab.holds_to_plain(measured, [lab.drive(rows=2, **more)], case, f"share {share}, passes of 2 rows")
            if Capability.DATA_PARALLEL in lab.spec.capabilities and share == SHARES[1]:
                lab.holds_to_plain(measured, lab.drive_split(case), case, f"share {share}, several ranks")

    @requirement("distillation.top_tokens", needs=Capability.DISTILLATION, since=(2, 1))
    def test_distillation_top_tokens(self, lab: TrainLab, measured: Measured) -> None:
        """The most probable tokens at t and their log-probs are those of plain torch, the best one first; 0 off the
        mask."""
        case = lab.case(optim=None)
        batch = train_batch(seed=4, masked=True).with_meta(top_k=TOP, temperature=TEMPERATURE)
        (found,) = lab.run(forward_all, case, [(batch, ("log_probs", "top_ids", "top_log_probs"))])
        mask = batch["response_mask"][:, None]
        logs = (plain_states(plain_model_of(case), batch)[1].double() / TEMPERATURE).log_softmax(-1)
        best = logs.topk(TOP, dim=-1).values * mask
        ids, top = found["top_ids"], found["top_log_probs"].double()
        assert ids.dtype is torch.int64
        assert ids.shape == top.shape == best.shape
        apart = max(float((top - best).abs().max()), float((logs.gather(-1, ids) * mask - best).abs().max()))
        measured.at_most("largest difference of log-probs", apart, 10 * lab.suite.tolerance)
        twice = sum(len(set(row)) < TOP for row in ids[batch["response_mask"]].tolist())
        measured.none("tokens with one named twice", [str(twice)] if twice else [])

    @requirement("distillation.top_divergence", needs=Capability.DISTILLATION, since=(2, 1))
    def test_distillation_top_divergence(self, lab: TrainLab, measured: Measured) -> None:
        """With a teacher's most probable tokens in place of its states, loss, gradient and weights are those of plain
        torch with these tokens and the rest as one more category; no teacher is loaded."""
        teacher = lab.variant("capped") or lab.variant("other") or lab.model
        plain = plain_model_of(lab.case(model=teacher))
        objective = Weighted(("log_probs", "divergence"))
        for share in SHARES:
            steps = [[taught(train_batch(seed=60 + at, masked=True), plain, share, top=TOP)] for at in range(2)]
            more: dict[str, Any] = {"steps": steps, "objective": objective, "witness": False}
            lab.holds_to_plain(measured, [lab.drive(rows=2, **more)], lab.case(**more), f"share {share}")


TOP = 7
"""How many of the most probable tokens are asked for."""


def taught(batch: Batch, teacher: Any, share: float, *, top: int = 0) -> Batch:
    """The batch with what a teacher computes of it, its states or its most probable tokens, and its logits for plain
    torch."""
    states, logits = plain_states(teacher, batch)
    logits = logits / TEMPERATURE
    batch = batch.with_tokens(**{PLAIN_TEACHER: logits})
    if top:
        values, ids = logits.double().log_softmax(-1).topk(top, dim=-1)
        batch = batch.with_tokens(teacher_top_ids=ids, teacher_top_log_probs=values.float())
    else:
        batch = batch.with_tokens(teacher_states=states)
    return batch.with_meta(temperature=0.8, teacher_temperature=TEMPERATURE, divergence_beta=share)


@torch.no_grad()
def plain_states(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Last hidden states `[N, H]`, and the logits `[N, V]` made of them, row by row: what predicts t is at t."""
    rows: Sequence[Tensor] = torch.split(batch["input_ids"], batch.lengths.tolist())
    found = [model(ids[None], output_hidden_states=True) for ids in rows]
    return _at_targets([one.hidden_states[-1][0] for one in found]), _at_targets([one.logits[0] for one in found])


def _at_targets(rows: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.cat([torch.zeros_like(row[:1]), row[:-1]]) for row in rows]).float()
