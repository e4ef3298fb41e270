"""Loss weights: how tokens share a mini-batch's loss."""

import numpy as np
import pytest
import torch
from algorithm_cases import make_batch, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.algorithms import Aggregation, loss_weights
from rlsdk.interfaces import Batch, ConfigError

LENGTHS = [(1, 2), (2, 6), (1, 4)]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 12, 1 / 12, 1 / 12]),
        ("sequence_mean", [1 / 6, 1 / 18, 1 / 12]),
        ("sequence_sum", [1 / 30, 1 / 30, 1 / 30]),
    ],
)
def test_by_hand(aggregation: str, expected: list[float]) -> None:
    batch = make_batch([0.0] * 3, [0, 1, 2], LENGTHS)
    weights = loss_weights(batch, aggregation, max_tokens=10)
    assert weights[batch.offsets[1:] - 1].tolist() == pytest.approx(expected)
    assert not weights[~batch["response_mask"]].any()
    assert weights.dtype == torch.float32


@settings(max_examples=150, deadline=None)
@given(steps(), st.sampled_from(list(Aggregation)))
def test_equals_the_papers_sum_over_rows(batch: Batch, aggregation: Aggregation) -> None:
    """The weighed sum of any per-token loss is the nested mean that the papers write."""
    loss = torch.randn(batch.num_tokens).double()
    valid, mask = batch["valid"].numpy(), batch["response_mask"].numpy()
    row = batch.row_of_token.numpy()
    rows = [loss.numpy()[(row == b) & mask] for b in range(batch.num_rows) if valid[b]]
    rows = [tokens for tokens in rows if len(tokens)]
    expected = {
        "token_mean": lambda: np.concatenate(rows).mean(),
        "sequence_mean": lambda: np.mean([tokens.mean() for tokens in rows]),
        "sequence_sum": lambda: sum(tokens.sum() for tokens in rows) / (len(rows) * 9),
    }[aggregation.value]
    found = float((loss * loss_weights(batch, aggregation, max_tokens=9)).sum())
    assert found == pytest.approx(expected() if rows else 0.0, rel=1e-4, abs=1e-5)


@settings(max_examples=50, deadline=None)
@given(steps(), st.sampled_from(["token_mean", "sequence_mean"]))
def test_the_means_add_up_to_one_or_to_nothing(batch: Batch, aggregation: str) -> None:
    counted = (batch["response_mask"] & batch["valid"][batch.row_of_token]).any()
    assert float(loss_weights(batch, aggregation).sum()) == pytest.approx(float(counted), abs=1e-5)


def test_a_mini_batch_without_anything_to_learn_has_no_weight_and_no_nan() -> None:
    batch = make_batch([0.0, 0.0], [0, 0], valid=[False, False])
    for aggregation in Aggregation:
        weights = loss_weights(batch, aggregation, max_tokens=4)
        assert not weights.any()
        assert weights.isfinite().all()


def test_rows_without_a_response_do_not_count() -> None:
    with_empty = make_batch([0.0, 0.0], [0, 0], [(1, 2), (3, 0)])
    alone = make_batch([0.0], [0], [(1, 2)])
    for aggregation in Aggregation:
        weights = loss_weights(with_empty, aggregation, max_tokens=4)
        assert torch.equal(weights[:3], loss_weights(alone, aggregation, max_tokens=4))


def test_an_unknown_aggregation_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"'token_meen' does not exist; did you mean 'token_mean'\?"):
        loss_weights(make_batch([0.0], [0]), "token_meen")


def test_sequence_sum_needs_its_constant() -> None:
    with pytest.raises(ConfigError, match="'sequence_sum' divides by max_tokens, which is None"):
        loss_weights(make_batch([0.0], [0]), "sequence_sum")
