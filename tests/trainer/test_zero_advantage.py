"""Rows without an advantage are left out of updates, and the updates stay what they were."""

from __future__ import annotations

import pytest
import torch

from rlsdk.algorithms import PolicyObjective, loss_weights
from rlsdk.interfaces import Batch, ModelSpec, OptimSpec, PolicyLossInputs, RankContext, TrainSpec
from rlsdk.reference.torch_engine import TorchTrainEngine
from rlsdk.testing.process.models import random_batch, write_tiny_model
from rlsdk.trainer.learner.mini_batches import with_signal


def own_loss(inputs: PolicyLossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return inputs.log_probs.exp(), {}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "m", seed=1))


def step_batch(seed: int, signal: float) -> Batch:
    """12 rows, of which a share has advantages."""
    generator = torch.Generator().manual_seed(seed)
    batch = random_batch(12, longest=20, seed=seed)
    strength = torch.randn(12, generator=generator) * (torch.rand(12, generator=generator) < signal)
    advantages = torch.where(batch["response_mask"], strength[batch.row_of_token], 0.0)
    old = torch.randn(batch.num_tokens, generator=generator) * 0.3 - 3.0
    batch = batch.with_tokens(advantages=advantages, old_log_probs=old)
    return batch.with_tokens(loss_weight=loss_weights(batch))


def train(model: str, batches: list[Batch]) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    engine = TorchTrainEngine()
    # Moments and decay move weights also where the gradient is zero.
    optim = OptimSpec(lr=1e-3, eps=1e-6, weight_decay=0.1, max_grad_norm=0.5)
    engine.initialize(
        RankContext(role="actor", seed=3), TrainSpec(model=ModelSpec(path=model), optim=optim, micro_batch_tokens=64)
    )
    losses, norms = [], []
    for batch in batches:
        losses.append(engine.forward_backward(batch, PolicyObjective()).loss)
        norms.append(engine.optim_step().grad_norm)
    return {name: p.detach().clone() for name, p in engine.parameters.items()}, losses, norms


def test_loss_gradient_and_weights_are_those_of_all_rows(model: str) -> None:
    batches = [step_batch(0, 0.5), step_batch(1, 0.3), step_batch(2, 0.0), step_batch(3, 1.0)]
    shorter = [batch.select(with_signal(batch, torch.arange(12))) for batch in batches]
    assert [part.num_rows < 12 for part in shorter] == [True, True, True, False]
    assert shorter[2].num_rows == 1
    expected, losses, norms = train(model, batches)
    found, short_losses, short_norms = train(model, shorter)
    assert short_losses == pytest.approx(losses, abs=1e-6)
    assert short_norms == pytest.approx(norms, rel=1e-5, abs=1e-9)
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, rtol=1e-5, atol=1e-5)


def test_rows_keep_their_order_and_only_those_asked_for_come_back() -> None:
    batch = step_batch(5, 0.5)
    strong = set(batch.row_sum(batch["advantages"].abs()).nonzero()[:, 0].tolist())
    asked = torch.tensor([11, 3, 4, 0, 7])
    assert with_signal(batch, asked).tolist() == [row for row in asked.tolist() if row in strong]


def test_only_a_loss_that_promises_it_loses_rows() -> None:
    assert PolicyObjective().zero_without_advantage
    assert not PolicyObjective(kl_coef=0.1).zero_without_advantage
    assert not PolicyObjective(entropy_coef=0.1).zero_without_advantage
    assert not PolicyObjective(loss=own_loss).zero_without_advantage
