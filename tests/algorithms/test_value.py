"""The critic's objective: by hand, its gradient, its metrics."""

import math
import pickle

import pytest
import torch
from algorithm_cases import cuts, make_batch, poison, steps
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsdk.algorithms import ValueObjective, explained_variance, loss_weights, update_means
from rlsdk.interfaces import Batch, BatchError, ConfigError, Objective, ObjectiveResult


def run(objective: Objective, batch: Batch, values: Tensor) -> tuple[ObjectiveResult, Tensor]:
    """The result, and the gradient on the values."""
    values = values.detach().clone().requires_grad_()
    result = objective({"values": values}, batch)
    result.loss.backward()
    assert values.grad is not None
    return result, values.grad


def weighed(batch: Batch) -> Batch:
    return batch.with_tokens(loss_weight=loss_weights(batch))


def means(result: ObjectiveResult) -> dict[str, float]:
    return update_means([{name: float(value) for name, value in result.sums.items()}])


def test_by_hand_with_and_without_a_clip() -> None:
    """Old values 0; the first new value moved too far towards a return of 2, the second within bounds, the third
    away."""
    batch = weighed(make_batch([0.0], [0], [(1, 3)]))
    batch = batch.with_tokens(values=torch.zeros(4), returns=torch.tensor([9.0, 2.0, 2.0, 2.0]))
    new = torch.tensor([5.0, 1.0, 0.1, -1.0])
    plain, gradient = run(ValueObjective(clip=None), batch, new)
    assert float(plain.loss.detach()) == pytest.approx((1 + 1.9**2 + 9) / 6)
    assert gradient.tolist() == pytest.approx([0, -1 / 3, -1.9 / 3, -1.0])
    clipped, gradient = run(ValueObjective(clip=0.5), batch, new)
    assert float(clipped.loss.detach()) == pytest.approx((1.5**2 + 1.9**2 + 9) / 6)
    assert gradient.tolist() == pytest.approx([0, 0, -1.9 / 3, -1.0])
    assert means(clipped)["value_clip_fraction"] == pytest.approx(1 / 3)
    assert means(clipped)["value"] == pytest.approx(0.1 / 3)
    assert float(clipped.maxima["value_error"]) == pytest.approx(3.0)


def in_plain_python(batch: Batch, new: Tensor, clip: float | None) -> float:
    total = 0.0
    for t in range(batch.num_tokens):
        if not batch["response_mask"][t]:
            continue
        value, old, target = float(new[t]), float(batch["values"][t]), float(batch["returns"][t])
        error = (value - target) ** 2
        if clip is not None:
            error = max(error, (min(max(value, old - clip), old + clip) - target) ** 2)
        total += float(batch["loss_weight"][t]) * error / 2
    return total


@settings(max_examples=50, deadline=None)
@given(steps(), st.none() | st.floats(0.05, 2.0))
def test_equals_plain_python(batch: Batch, clip: float | None) -> None:
    batch = weighed(batch)
    found, _ = run(ValueObjective(clip=clip), batch, batch["log_probs"])
    assert float(found.loss.detach()) == pytest.approx(
        in_plain_python(batch, batch["log_probs"], clip), rel=1e-4, abs=1e-6
    )


@pytest.mark.parametrize("clip", [None, 0.3])
@settings(max_examples=3, deadline=None)
@given(batch=steps())
def test_gradcheck(clip: float | None, batch: Batch) -> None:
    batch = weighed(batch)
    values = batch["log_probs"].double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: ValueObjective(clip=clip)({"values": x}, batch).loss, (values,), eps=1e-6, atol=1e-4
    )


@settings(max_examples=40, deadline=None)
@given(st.data(), steps())
def test_micro_batches_add_up(data: st.DataObject, batch: Batch) -> None:
    batch = weighed(batch)
    whole, gradient = run(ValueObjective(), batch, batch["log_probs"])
    parts = data.draw(cuts(batch.num_rows))
    results = [run(ValueObjective(), batch.select(rows), batch["log_probs"][batch.token_index(rows)]) for rows in parts]
    torch.testing.assert_close(sum(r.loss for r, _ in results), whole.loss, rtol=1e-4, atol=1e-5)
    for name, value in whole.sums.items():
        torch.testing.assert_close(sum(r.sums[name] for r, _ in results), value, rtol=1e-4, atol=1e-5)
    for (_, found), rows in zip(results, parts, strict=True):
        torch.testing.assert_close(found, gradient[batch.token_index(rows)], rtol=1e-4, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(steps())
def test_what_stands_off_the_mask_changes_nothing_not_even_nan(batch: Batch) -> None:
    batch = weighed(batch)
    noisy = poison(batch, "values", "returns", "loss_weight", "log_probs")
    clean, gradient = run(ValueObjective(), batch, batch["log_probs"])
    found, noisy_gradient = run(ValueObjective(), noisy, noisy["log_probs"])
    assert torch.equal(found.loss, clean.loss)
    assert torch.equal(noisy_gradient, gradient)
    assert found.sums == clean.sums


def test_explained_variance_by_hand() -> None:
    """Returns 0, 2 (variance 1); a constant critic explains nothing, an exact one all, a biased one all as well."""
    batch = weighed(make_batch([0.0], [0])).with_tokens(returns=torch.tensor([0.0, 0.0, 2.0]))
    for values, expected in (
        ([0.0, 1.0, 1.0], 0.0),
        ([0.0, 0.0, 2.0], 1.0),
        ([0.0, 3.0, 5.0], 1.0),
        ([0, 2.0, 0], -3.0),
    ):
        result, _ = run(ValueObjective(clip=None), batch, torch.tensor(values))
        assert explained_variance(means(result)) == pytest.approx(expected, abs=1e-6)
    flat = batch.with_tokens(returns=torch.ones(3))
    assert math.isnan(explained_variance(means(run(ValueObjective(clip=None), flat, torch.zeros(3))[0])))


def test_it_says_what_it_reads() -> None:
    assert ValueObjective().outputs == ("values",)
    assert set(ValueObjective().fields) == {"response_mask", "loss_weight", "returns", "values"}
    assert "values" not in ValueObjective(clip=None).fields
    assert isinstance(ValueObjective(), Objective)
    assert pickle.loads(pickle.dumps(ValueObjective(clip=0.1))) == ValueObjective(clip=0.1)
    batch = weighed(make_batch([0.0], [0])).with_tokens(returns=torch.zeros(3))
    run(ValueObjective(clip=None), batch, torch.zeros(3))
    with pytest.raises(BatchError, match="no field 'values'"):
        run(ValueObjective(), batch, torch.zeros(3))


def test_a_clip_that_is_not_above_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"value clip is 0\.0"):
        ValueObjective(clip=0.0)


def test_a_batch_of_no_rows_gives_zero() -> None:
    batch = weighed(make_batch([0.0], [0])).with_tokens(values=torch.zeros(3), returns=torch.zeros(3))
    result, _ = run(ValueObjective(), batch.select(slice(0, 0)), torch.zeros(0))
    assert float(result.loss.detach()) == 0.0
