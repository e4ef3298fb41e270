"""The torch engine against a training loop on plain transformers: numbers, precision, steps that go wrong, refusals."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_cases import (
    BATCHES,
    OPTIM,
    Weighted,
    _one_thread,
    assert_equal,
    assert_near,
    make,
    models,
    train,
    train_plainly,
    weights,
)

from rlsdk.algorithms import PolicyObjective
from rlsdk.interfaces import Batch, ConfigError, Head, ObjectiveResult, OptimSpec, RankContext, RlsdkError
from rlsdk.testing.process.models import random_batch
from rlsdk.testing.process.reference import load_plain_model, plain_outputs

__all__ = ["_one_thread", "models"]

# What it computes


@pytest.mark.parametrize("name", ["plain", "tied"])
def test_three_steps_equal_a_plain_loop(models: dict[str, str], name: str) -> None:
    engine = make(models[name])
    found = train(engine)
    expected, parameters = train_plainly(models[name])
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-6, abs=1e-6)
    assert_near(weights(engine), parameters)


@pytest.mark.parametrize(
    "cut",
    [
        {"micro_batch_rows": 1},
        {"micro_batch_rows": 3},
        {"micro_batch_rows": 100},
        {"micro_batch_tokens": 1},
        {"micro_batch_tokens": 40},
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "micro_batch_rows": 2},
    ],
    ids=str,
)
def test_the_cut_into_micro_batches_changes_nothing(models: dict[str, str], cut: dict[str, Any]) -> None:
    engine, whole = make(models["plain"], **cut), make(models["plain"])
    for mine, theirs in zip(train(engine), train(whole), strict=True):
        assert mine == pytest.approx(theirs, rel=2e-6, abs=1e-6)
    assert_near(weights(engine), weights(whole))


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 9), longest=st.integers(2, 40), seed=st.integers(0, 1000), limit=st.integers(1, 60))
def test_gradients_are_the_same_for_any_lengths_and_any_token_budget(
    models: dict[str, str], rows: int, longest: int, seed: int, limit: int
) -> None:
    batch = random_batch(rows, longest=longest, seed=seed)
    cut, whole = make(models["plain"], micro_batch_tokens=limit), make(models["plain"])
    mine, theirs = cut.forward_backward(batch, Weighted()), whole.forward_backward(batch, Weighted())
    assert mine.loss == pytest.approx(theirs.loss, rel=1e-5, abs=1e-6)
    assert cut.optim_step().grad_norm == pytest.approx(whole.optim_step().grad_norm, rel=1e-5)


def test_the_order_of_rows_changes_nothing(models: dict[str, str]) -> None:
    shuffled = [batch.select(torch.randperm(8, generator=torch.Generator().manual_seed(1))) for batch in BATCHES]
    one, other = make(models["plain"]), make(models["plain"])
    for mine, theirs in zip(train(one, shuffled), train(other), strict=True):
        assert mine == pytest.approx(theirs, rel=2e-6, abs=1e-6)
    assert_near(weights(one), weights(other))


def test_gradients_add_up_over_calls(models: dict[str, str]) -> None:
    parts, whole = make(models["plain"]), make(models["plain"])
    batch = BATCHES[0]
    losses = [parts.forward_backward(batch.select(rows), Weighted()).loss for rows in ([0, 3, 5], [1, 2], [4, 6, 7])]
    assert sum(losses) == pytest.approx(whole.forward_backward(batch, Weighted()).loss, rel=1e-6)
    assert parts.optim_step().grad_norm == pytest.approx(whole.optim_step().grad_norm, rel=2e-6)
    assert_near(weights(parts), weights(whole))


def test_metrics_add_up_and_the_largest_counts_over_micro_batches(models: dict[str, str]) -> None:
    engine, whole = make(models["plain"], micro_batch_rows=3), make(models["plain"])
    found, expected = (e.forward_backward(BATCHES[0], Weighted()) for e in (engine, whole))
    assert (found.num_micro_batches, expected.num_micro_batches) == (3, 1)
    assert found.sums["rows"] == expected.sums["rows"] == 8
    assert found.sums["weight"] == pytest.approx(1.0)
    assert found.sums["loss"] == pytest.approx(found.loss)
    assert found.maxima["nll"] == pytest.approx(expected.maxima["nll"], rel=1e-6)


def test_tokens_off_the_mask_carry_no_gradient(models: dict[str, str]) -> None:
    """A row whose answer is masked changes nothing, whatever stands in it."""
    batch = BATCHES[0]
    silent = batch.row_of_token == 2
    masked = batch.with_tokens(
        response_mask=batch["response_mask"] & ~silent, loss_weight=torch.where(silent, 0.0, batch["loss_weight"])
    )
    without = masked.select([0, 1, 3, 4, 5, 6, 7])
    one, other = make(models["plain"]), make(models["plain"])
    assert one.forward_backward(masked, Weighted()).loss == pytest.approx(
        other.forward_backward(without, Weighted()).loss, rel=2e-6
    )
    assert one.optim_step().grad_norm == pytest.approx(other.optim_step().grad_norm, rel=2e-6)


def test_forward_equals_plain_transformers_in_the_order_of_the_rows(models: dict[str, str]) -> None:
    batch = BATCHES[0].with_meta(temperature=0.8)
    found = make(models["plain"], micro_batch_tokens=40).forward(batch, ("log_probs", "entropy"))
    expected = plain_outputs(load_plain_model(models["plain"]), batch)
    for name, values in found.items():
        assert not values.requires_grad
        assert values.dtype is torch.float32
        torch.testing.assert_close(values, expected[name].detach() * batch["response_mask"], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(("head", "output", "size"), [(Head.VALUE, "values", 8), (Head.SCORE, "scores", 2)])
def test_value_and_score_models_learn_their_targets(models: dict[str, str], head: Head, output: str, size: int) -> None:
    @dataclass(frozen=True)
    class Squared:
        outputs: Sequence[str] = (output,)

        def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
            return ObjectiveResult(loss=(outputs[output] - 1.5).square().mean())

    batch = Batch.from_rows([[5, 6, 7], [9, 8, 7, 6, 5]])
    engine = make(models["plain"], head=head, optim=OptimSpec(lr=1e-3))
    assert engine.forward(batch, (output,))[output].shape == (size,)
    losses = []
    for _ in range(20):
        losses.append(engine.forward_backward(batch, Squared()).loss)
        engine.optim_step()
    assert losses[-1] < losses[0] / 2


def test_an_empty_batch_is_computed_and_trained_on_without_effect(models: dict[str, str]) -> None:
    engine = make(models["plain"])
    empty = BATCHES[0].select([])
    assert engine.forward(empty, ("log_probs",))["log_probs"].shape == (0,)
    assert engine.forward_backward(empty, Weighted()).loss == 0.0
    assert engine.optim_step().grad_norm == 0.0
    before = weights(make(models["plain"]))
    assert_equal(weights(engine), before)


def test_the_products_objective_trains_and_can_be_pickled(models: dict[str, str]) -> None:
    objective = pickle.loads(pickle.dumps(PolicyObjective(entropy_coef=0.01)))
    engine = make(models["plain"], micro_batch_rows=2)
    result = engine.forward_backward(BATCHES[0], objective)
    assert result.sums["loss_weight"] == pytest.approx(1.0)
    assert engine.optim_step().grad_norm > 0


# Precision


def test_bfloat16_computes_with_rounded_copies_and_trains_float32_masters(models: dict[str, str]) -> None:
    low, high = make(models["plain"], dtype="bfloat16"), make(models["plain"])
    assert {p.dtype for p in low.engine.model.parameters()} == {torch.bfloat16}
    assert {meta.dtype for meta in low.layout().tensors} == {"float32"}
    for mine, theirs in zip(train(low), train(high), strict=True):
        assert mine == pytest.approx(theirs, rel=0.1)
    assert_near(weights(low), weights(high), 5e-3)
    for name, parameter in low.engine.model.named_parameters():
        assert torch.equal(parameter, weights(low)[name].bfloat16())


def test_steps_far_below_bfloat16s_resolution_are_not_lost(models: dict[str, str]) -> None:
    engine = make(models["plain"], dtype="bfloat16", optim=OptimSpec(lr=1e-6))
    before = weights(engine)["model.embed_tokens.weight"]
    train(engine)
    moved = (weights(engine)["model.embed_tokens.weight"] - before).abs().max()
    assert 0 < float(moved) < 1e-5


def test_gradients_of_many_micro_batches_are_added_in_float32(models: dict[str, str]) -> None:
    engine, whole = make(models["plain"], dtype="bfloat16", micro_batch_rows=1), make(models["plain"])
    for each in (engine, whole):
        each.forward_backward(BATCHES[0], Weighted())
    for name, parameter in whole.engine.parameters.items():
        mine, theirs = engine.engine.parameters[name].grad, parameter.grad
        assert mine is not None
        assert theirs is not None
        assert float((mine - theirs).norm()) < 0.1 * float(theirs.norm()) + 1e-6, name
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in engine.engine.parameters.values())
    assert all(p.grad is None for p in engine.engine.model.parameters())


def test_a_frozen_model_is_held_in_its_own_dtype_and_refuses_to_train(models: dict[str, str]) -> None:
    engine = make(models["plain"], dtype="bfloat16", optim=None)
    assert {meta.dtype for meta in engine.layout().tensors} == {"bfloat16"}
    assert engine.forward(BATCHES[0], ("log_probs",))["log_probs"].dtype is torch.float32
    for call in (lambda: engine.forward_backward(BATCHES[0], Weighted()), engine.optim_step):
        with pytest.raises(ConfigError, match="'actor' is frozen: it was built without an OptimSpec"):
            call()
    with pytest.raises(ConfigError, match="is frozen"):
        engine.reset_optimizer(OPTIM)


# Steps that go wrong


def test_a_gradient_that_is_not_finite_is_skipped_and_leaves_no_trace(models: dict[str, str]) -> None:
    engine, other = make(models["plain"]), make(models["plain"])
    poisoned = BATCHES[1].with_tokens(advantages=torch.full_like(BATCHES[1]["advantages"], math.inf))
    train(engine, BATCHES[:1])
    engine.forward_backward(poisoned, Weighted())
    step = engine.optim_step()
    assert step.skipped
    assert not math.isfinite(step.grad_norm)
    assert train(engine, BATCHES[1:]) == train(other, BATCHES)[1:]
    assert_equal(weights(engine), weights(other))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_objective_that_raises_is_heard_and_its_gradients_are_dropped(models: dict[str, str], dtype: str) -> None:
    calls = []

    class Failing(Weighted):
        def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
            calls.append(batch.num_rows)
            if len(calls) == 3:
                raise ZeroDivisionError("of the user's own making")
            return super().__call__(outputs, batch)

    engine = make(models["plain"], micro_batch_rows=2, dtype=dtype)
    with pytest.raises(ZeroDivisionError, match="of the user's own making"):
        engine.forward_backward(BATCHES[0], Failing())
    assert engine.optim_step().grad_norm == 0.0


def test_a_batch_without_the_objectives_fields_says_what_it_has(models: dict[str, str]) -> None:
    with pytest.raises(RlsdkError, match="no field 'loss_weight'"):
        make(models["plain"]).forward_backward(Batch.from_rows([[1, 2, 3]]), Weighted())


# Memory and refusals


def test_what_is_offloaded_is_refused_until_it_is_back_and_then_nothing_changed(models: dict[str, str]) -> None:
    engine, other = make(models["plain"]), make(models["plain"])
    engine.forward_backward(BATCHES[0], Weighted())
    other.forward_backward(BATCHES[0], Weighted())
    engine.offload(("optimizer", "gradients"))
    list(engine.shards())
    engine.forward(BATCHES[0], ("log_probs",))
    with pytest.raises(RlsdkError, match=r"\['optimizer', 'gradients'\] .* are offloaded; call onload"):
        engine.optim_step()
    engine.offload(("weights",))
    engine.offload()
    for call in (lambda: list(engine.shards()), lambda: engine.forward(BATCHES[0], ("log_probs",))):
        with pytest.raises(RlsdkError, match="are offloaded"):
            call()
    engine.onload()
    assert engine.optim_step() == other.optim_step()
    assert train(engine, BATCHES[1:]) == train(other, BATCHES[1:])
    assert_equal(weights(engine), weights(other))


def test_an_unknown_part_is_refused_with_the_nearest_name(models: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="'weight'; did you mean 'weights'"):
        make(models["plain"]).offload(("weight",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ctx": RankContext(role="actor", world_size=2)}, "runs in one process, but the actor pool has 2 devices"),
        ({"dtype": "float16"}, "trains in 'float32' or 'bfloat16'"),
        ({"micro_batch_rows": 1, "micro_batch_tokens": 1}, "expected one of them"),
        ({"micro_batch_tokens": None}, "expected one of them"),
        ({"engine_kwargs": {"turbo": True}}, r"pass \['turbo'\] to"),
        ({"optim": OptimSpec(schedule="cosine")}, "total_steps"),
    ],
)
def test_what_it_cannot_do_is_refused_at_the_start(
    models: dict[str, str], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(models["plain"], **change)


def test_closing_twice_is_safe_and_frees_the_model(models: dict[str, str]) -> None:
    engine = make(models["plain"])
    engine.close()
    engine.close()
    assert not hasattr(engine, "model")
