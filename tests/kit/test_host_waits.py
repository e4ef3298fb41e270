"""A micro-batch is worked out on the CPU and sent in one copy: the host does not wait for an accelerator to learn a
size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlsdk.algorithms import PolicyObjective, gspo
from rlsdk.algorithms.objectives.value import ValueObjective
from rlsdk.interfaces import Batch, Head, ModelSpec, Objective, OptimSpec, RankContext, TrainSpec
from rlsdk.kit.model import pass_plan
from rlsdk.kit.model.device_copies import ALIGNMENT, join, split
from rlsdk.reference.torch_engine import TorchTrainEngine
from rlsdk.testing.process.host_waits import HostWaits
from rlsdk.testing.process.models import random_batch, write_tiny_model


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: float((x * 2).max()),
        lambda x: bool((x > 1).any()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.detach().numpy(),
        lambda x: (x > 1).nonzero(),
        lambda x: x.unique(),
        lambda x: torch.equal(x, x + 1),
        lambda x: x[x > 1],
        lambda x: x.index_put_((x > 1,), torch.tensor(0.0)),
        lambda x: torch.repeat_interleave(x.long()),
        lambda x: torch.autograd.grad((x.requires_grad_() * 2).sum(), x)[0].tolist(),
    ],
)
def test_a_wait_is_counted(read: Callable[[Tensor], object]) -> None:
    waits, sent, stays = HostWaits(), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0])
    waits.mark(sent)
    with waits.counting():
        read(stays)
        assert waits.found == []
        read(sent)
    assert len(waits.found) == 1


def test_what_needs_no_wait_is_not_counted() -> None:
    waits, sent = HostWaits(), torch.tensor([1.0, 2.0, 3.0])
    waits.mark(sent)
    with waits.counting():
        torch.where(sent > 1, sent, 0.0).index_select(0, torch.tensor([0, 2])).log_softmax(0).sum()
        sent[torch.tensor([0, 1])] += sent.cumsum(0)[:2]
        torch.repeat_interleave(sent, torch.tensor([1, 2, 1]), output_size=4)
    assert waits.found == []


def step(folder: Path, head: Head, objective: Objective, batch: Batch) -> HostWaits:
    """Waits of four micro-batches forward and backward."""
    engine, waits = TorchTrainEngine(), HostWaits()
    model = ModelSpec(path=str(write_tiny_model(folder)), head=head)
    engine.initialize(RankContext(role="actor"), TrainSpec(model=model, optim=OptimSpec(), micro_batch_rows=3))
    with waits.counting():
        found = engine.forward_backward(batch, objective)
    assert found.num_micro_batches == waits.num_copies == 4
    return waits


def with_fields(batch: Batch) -> Batch:
    noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    names = ("advantages", "returns", "values", "old_log_probs", "rollout_log_probs", "ref_log_probs")
    return batch.with_tokens(**dict.fromkeys(names, noise))


@pytest.fixture(params=[0.15, -1.0], ids=["cheapest", "packed"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator packs every micro-batch, a CPU those that it pays for."""
    monkeypatch.setattr(pass_plan, "MIN_SAVED", request.param)


@pytest.mark.parametrize(
    "objective",
    [
        PolicyObjective(),
        PolicyObjective(kl_coef=0.1, entropy_coef=0.01),
        PolicyObjective(loss=gspo),
    ],
    ids=["default", "kl and entropy", "gspo"],
)
@pytest.mark.usefixtures("form")
def test_an_update_waits_at_most_twice_a_micro_batch(tmp_path: Path, objective: PolicyObjective) -> None:
    waits = step(tmp_path, Head.LM, objective, with_fields(random_batch(12, longest=24, seed=5)))
    assert len(waits.found) <= 2 * 4, waits.found


@pytest.mark.usefixtures("form")
def test_the_default_objective_waits_once_an_update_for_its_metrics(tmp_path: Path) -> None:
    waits = step(tmp_path, Head.LM, PolicyObjective(), with_fields(random_batch(12, longest=24, seed=5)))
    assert len(waits.found) == 1, waits.found
    waits = step(tmp_path, Head.VALUE, ValueObjective(), with_fields(random_batch(12, longest=24, seed=5)))
    assert len(waits.found) == 1, waits.found


@pytest.mark.usefixtures("form")
def test_a_forward_pass_waits_once_a_micro_batch(tmp_path: Path) -> None:
    engine, waits = TorchTrainEngine(), HostWaits()
    spec = TrainSpec(model=ModelSpec(path=str(write_tiny_model(tmp_path))), optim=None, micro_batch_rows=3)
    engine.initialize(RankContext(role="ref"), spec)
    batch = random_batch(12, longest=24, seed=5)
    with waits.counting():
        engine.forward(batch, ("log_probs", "entropy"))
    assert len(waits.found) == waits.num_copies == 4, waits.found


DTYPES = st.sampled_from([torch.int64, torch.float32, torch.bool, torch.int32, torch.bfloat16, torch.float64])


@given(st.lists(st.tuples(DTYPES, st.lists(st.integers(0, 5), max_size=3)), max_size=8))
def test_tensors_of_any_dtype_and_shape_travel_together(shapes: list[tuple[torch.dtype, list[int]]]) -> None:
    tensors = {str(at): torch.randint(0, 2, shape).to(dtype) for at, (dtype, shape) in enumerate(shapes)}
    joined = join(tensors)
    found = split(joined.clone(), tensors)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor)
        assert tensor.numel() == 0 or found[name].storage_offset() * tensor.element_size() % ALIGNMENT == 0
