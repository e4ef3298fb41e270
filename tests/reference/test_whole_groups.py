"""Objectives on pairs: an engine that cuts micro-batches keeps the rows of a `uid` together."""

from __future__ import annotations

import pytest
import torch

from rlsdk.algorithms import DpoObjective, RewardModelObjective, pair_weights
from rlsdk.interfaces import Batch, Head, ModelSpec, Objective, OptimSpec, RankContext, TrainSpec
from rlsdk.reference.torch_engine import TorchTrainEngine
from rlsdk.testing.process.models import random_batch, write_tiny_model


def pairs() -> Batch:
    """Eight rows; the two of a pair are of unequal length and far apart."""
    batch = random_batch(8, longest=20, seed=3)
    order = batch.lengths.argsort()
    uid = torch.empty(8, dtype=torch.int64)
    uid[order] = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0])
    chosen = torch.zeros(8, dtype=torch.bool)
    chosen[order[:4]] = True
    batch = batch.with_tokens(ref_log_probs=torch.full((batch.num_tokens,), -3.0))
    return pair_weights(batch.with_rows(uid=uid, chosen=chosen))


@pytest.mark.parametrize(
    ("head", "objective"), [(Head.SCORE, RewardModelObjective()), (Head.LM, DpoObjective())], ids=["reward", "dpo"]
)
def test_the_gradient_does_not_depend_on_how_pairs_are_cut(
    head: Head, objective: Objective, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With two rows a micro-batch the engine sorted rows by length and cut every pair."""
    path = str(write_tiny_model(tmp_path_factory.mktemp("models") / "m", seed=1))
    found = []
    for rows in (8, 2):
        engine = TorchTrainEngine()
        engine.initialize(
            RankContext(role="actor", seed=3),
            TrainSpec(
                model=ModelSpec(path=path, head=head),
                optim=OptimSpec(lr=1e-3),
                micro_batch_tokens=None,
                micro_batch_rows=rows,
            ),
        )
        result = engine.forward_backward(pairs(), objective)
        found.append((result.loss, engine.optim_step().grad_norm, result.num_micro_batches))
    (whole, norm, one), (cut, cut_norm, four) = found
    assert (one, four) == (1, 4)
    assert cut == pytest.approx(whole, rel=1e-5)
    assert cut_norm == pytest.approx(norm, rel=1e-4)
    assert norm > 0
