"""Steps of the torch engine, and the same on plain transformers, written out here and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from rlsdk.interfaces import Batch, Head, ModelSpec, ObjectiveResult, OptimSpec, RankContext, TrainSpec
from rlsdk.kit.guards.guarded_train import GuardedTrainEngine
from rlsdk.reference.torch_engine import TorchTrainEngine
from rlsdk.testing.process.models import random_batch, write_tiny_model
from rlsdk.testing.process.reference import load_plain_model, plain_outputs

OPTIM = OptimSpec(
    lr=1e-3,
    betas=(0.9, 0.95),
    # Above the rounding noise of gradients: with 1e-8 Adam makes a full step of the noise in an element that is 0.
    eps=1e-6,
    weight_decay=0.1,
    max_grad_norm=0.5,
    schedule="linear",
    warmup_steps=2,
    total_steps=10,
)
CTX = RankContext(role="actor", seed=3)
BATCHES = [random_batch(8, longest=24, seed=seed) for seed in range(3)]


@dataclass(frozen=True)
class Weighted:
    """Differs from every objective of the product: weights, entropy and two metrics."""

    entropy_coef: float = 0.1

    @property
    def outputs(self) -> Sequence[str]:
        return ("log_probs", "entropy")

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        weight = batch["loss_weight"]
        per_token = batch["advantages"] * outputs["log_probs"] + self.entropy_coef * outputs["entropy"]
        largest = (outputs["log_probs"].detach().abs() * batch["response_mask"]).max()
        loss = -(weight * per_token).sum()
        return ObjectiveResult(
            loss=loss, sums={"weight": weight.sum(), "rows": batch.num_rows, "loss": loss}, maxima={"nll": largest}
        )


def make(
    path: str, *, ctx: RankContext = CTX, dtype: str = "float32", head: Head = Head.LM, **spec: Any
) -> GuardedTrainEngine:
    engine = GuardedTrainEngine(TorchTrainEngine())
    limits = {} if "micro_batch_rows" in spec or "micro_batch_tokens" in spec else {"micro_batch_tokens": 10_000}
    settings = {"optim": OPTIM, **limits, **spec}
    engine.initialize(ctx, TrainSpec(model=ModelSpec(path=path, dtype=dtype, head=head), **settings))
    return engine


def weights(engine: GuardedTrainEngine) -> dict[str, Tensor]:
    return {shard.name: shard.tensor.clone() for shard in engine.shards()}


def train(engine: GuardedTrainEngine, batches: Sequence[Batch] = BATCHES) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    return [(engine.forward_backward(batch, Weighted()).loss, engine.optim_step().grad_norm) for batch in batches]


def train_plainly(path: str, batches: Sequence[Batch] = BATCHES) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """The same steps by hand: one row at a time, clipping and AdamW written out."""
    model = load_plain_model(path)
    named = dict(model.named_parameters())
    first = {name: torch.zeros_like(p) for name, p in named.items()}
    second = {name: torch.zeros_like(p) for name, p in named.items()}
    found = []
    for step, batch in enumerate(batches):
        out = plain_outputs(model, batch)
        loss = -(batch["loss_weight"] * (batch["advantages"] * out["log_probs"] + 0.1 * out["entropy"])).sum()
        model.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in named.values()))
        lr = OPTIM.lr * (step + 1) / 2 if step < 2 else OPTIM.lr * (1 - (step - 2) / 8)
        with torch.no_grad():
            for name, p in named.items():
                gradient = p.grad * min(1.0, OPTIM.max_grad_norm / norm)
                p *= 1 - lr * OPTIM.weight_decay * (p.dim() > 1)
                first[name] = 0.9 * first[name] + 0.1 * gradient
                second[name] = 0.95 * second[name] + 0.05 * gradient**2
                unbiased = first[name] / (1 - 0.9 ** (step + 1)), second[name] / (1 - 0.95 ** (step + 1))
                p -= lr * unbiased[0] / (unbiased[1].sqrt() + OPTIM.eps)
        found.append((loss.item(), norm))
    return found, {name: p.detach() for name, p in named.items()}


def assert_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        "plain": str(write_tiny_model(root / "plain", seed=1)),
        "tied": str(write_tiny_model(root / "tied", architecture="llama", tied=True, seed=2)),
        "other": str(write_tiny_model(root / "other", layers=3, seed=3)),
    }
