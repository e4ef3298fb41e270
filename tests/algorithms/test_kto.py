"""KTO on labelled answers: by hand, against plain Python in float64, gradients, and over splits of the rows."""

import math
import pickle

import pytest
import torch
from algorithm_cases import make_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlsdk.algorithms import KtoObjective, label_weights, mean_log_ratio, update_means
from rlsdk.interfaces import Batch, ConfigError, Objective, ObjectiveResult

KTO = KtoObjective(beta=0.4, desirable_weight=1.3, undesirable_weight=0.7)


@st.composite
def labelled(draw: st.DrawFn) -> Batch:
    """Up to eight rows, some with an empty response, of any labels, with an estimate of either sign; float64."""
    count = draw(st.integers(1, 8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    lengths = [(1 + i % 3, int(n)) for i, n in enumerate(torch.randint(0, 6, (count,), generator=generator))]
    labels = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    batch = label_weights(make_batch([0.0] * count, list(range(count)), lengths, chosen=labels))
    n = batch.num_tokens
    return batch.with_tokens(
        log_probs=torch.randn(n, generator=generator, dtype=torch.float64),
        ref_log_probs=torch.randn(n, generator=generator, dtype=torch.float64),
    ).with_rows(
        row_weight=torch.full((count,), 1.0 / count, dtype=torch.float64),
        log_ratio_estimate=torch.full((count,), draw(st.floats(-2, 2)), dtype=torch.float64),
    )


def run(objective: KtoObjective, batch: Batch, numbers: Tensor | None = None) -> tuple[ObjectiveResult, Tensor]:
    numbers = (batch["log_probs"].double().clone() if numbers is None else numbers).requires_grad_()
    result = objective({"log_probs": numbers}, batch)
    result.loss.backward()
    assert numbers.grad is not None
    return result, numbers.grad


def by_hand(estimate: float) -> Batch:
    """Desirable: log p - log ref = 1.0; undesirable: -0.5."""
    made = label_weights(make_batch([0.0, 0.0], [1, 2], [(1, 2), (1, 1)], chosen=[True, False]))
    return made.with_tokens(
        log_probs=torch.tensor([-9.0, -1.0, -1.0, -9.0, -2.0]),
        ref_log_probs=torch.tensor([7.0, -1.5, -1.5, 7.0, -1.5]),
    ).with_rows(log_ratio_estimate=torch.full((2,), estimate))


@pytest.mark.parametrize(("estimate", "kl"), [(0.25, 0.25), (-3.0, 0.0)])
def test_kto_by_hand(estimate: float, kl: float) -> None:
    """An estimate below 0 counts as 0."""
    result, _ = run(KtoObjective(beta=0.5, desirable_weight=1.5), by_hand(estimate))
    good, bad = 1 / (1 + math.exp(0.5 * (1.0 - kl))), 1 / (1 + math.exp(0.5 * (kl + 0.5)))
    assert float(result.loss.detach()) == pytest.approx((1.5 * good + bad) / 2)
    found = update_means([{name: float(value) for name, value in result.sums.items()}])
    assert found["accuracy"] == 1.0
    assert found["kl"] == pytest.approx(kl)
    assert found["reward_margin"] == pytest.approx(0.5 * (1.0 - kl + kl + 0.5) / 2)


@settings(max_examples=50, deadline=None)
@given(labelled())
def test_equals_the_paper_in_plain_python(batch: Batch) -> None:
    """Equations 7 and 8: the mean of lambda_y - v(x, y)."""
    owner, mask = batch.row_of_token.tolist(), batch["response_mask"].tolist()
    ratios = [0.0] * batch.num_rows
    for t, (ours, theirs) in enumerate(zip(batch["log_probs"].tolist(), batch["ref_log_probs"].tolist(), strict=True)):
        ratios[owner[t]] += (ours - theirs) * mask[t]
    z = max(0.0, float(batch["log_ratio_estimate"][0]))
    losses = []
    for ratio, desirable in zip(ratios, batch["chosen"].tolist(), strict=True):
        weight = KTO.desirable_weight if desirable else KTO.undesirable_weight
        value = weight / (1 + math.exp(-KTO.beta * (ratio - z if desirable else z - ratio)))
        losses.append(weight - value)
    result, _ = run(KTO, batch)
    assert float(result.loss.detach()) == pytest.approx(sum(losses) / len(losses), rel=1e-12, abs=1e-14)


@settings(max_examples=3, deadline=None)
@given(batch=labelled())
def test_gradcheck(batch: Batch) -> None:
    numbers = batch["log_probs"].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: KTO({"log_probs": x}, batch).loss, (numbers,), eps=1e-6, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.data(), labelled())
def test_micro_batches_of_any_rows_add_up(data: st.DataObject, batch: Batch) -> None:
    whole, gradient = run(KTO, batch)
    side = torch.tensor(data.draw(st.lists(st.booleans(), min_size=batch.num_rows, max_size=batch.num_rows)))
    loss = 0.0
    for rows in (side.nonzero()[:, 0], (~side).nonzero()[:, 0]):
        part, part_gradient = run(KTO, batch.select(rows))
        loss += float(part.loss.detach())
        torch.testing.assert_close(part_gradient, gradient[batch.token_index(rows)])
    assert loss == pytest.approx(float(whole.loss.detach()), rel=1e-9, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(labelled())
def test_prompts_change_nothing_not_even_nan(batch: Batch) -> None:
    clean, gradient = run(KTO, batch)
    on = batch["response_mask"]
    noisy = batch.with_tokens(
        **{name: torch.where(on, batch[name], torch.nan) for name in ("log_probs", "ref_log_probs")}
    )
    found, noisy_gradient = run(KTO, noisy)
    assert torch.equal(found.loss, clean.loss)
    assert torch.equal(noisy_gradient, gradient)
    assert mean_log_ratio(noisy, noisy["log_probs"]) == mean_log_ratio(batch, batch["log_probs"])


def test_the_estimate_is_the_mean_over_rows_of_whole_responses() -> None:
    batch = by_hand(0.0)
    assert mean_log_ratio(batch, batch["log_probs"]) == pytest.approx((1.0 - 0.5) / 2)
    assert mean_log_ratio(batch.select(slice(0, 0)), torch.zeros(0)) == 0.0


def test_it_reads_its_fields_and_no_others() -> None:
    batch = by_hand(0.25)
    cut, _ = run(KTO, batch.keep(KTO.fields), batch["log_probs"].double().clone())
    assert torch.equal(cut.loss, run(KTO, batch)[0].loss)
    assert isinstance(KTO, Objective)
    assert pickle.loads(pickle.dumps(KTO)) == KTO
    assert float(run(KTO, batch.select(slice(0, 0)))[0].loss.detach()) == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [({"beta": 0.0}, "KTO beta is 0.0"), ({"undesirable_weight": -1.0}, "KTO undesirable_weight is -1.0")],
)
def test_options_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KtoObjective(**options)
