"""Loss weights: how tokens share a mini-batch's loss."""

from collections import defaultdict

import numpy as np
import pytest
import torch
from algorithm_cases import make_batch, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.algorithms import AGGREGATIONS, Aggregation, keep_top_entropy, loss_weights, overlong_filter
from rlsdk.interfaces import Batch, ConfigError
from rlsdk.registry import ComponentKind, Registry

LENGTHS = [(1, 2), (2, 6), (1, 4)]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 12, 1 / 12, 1 / 12]),
        ("sequence_mean", [1 / 6, 1 / 18, 1 / 12]),
        ("sequence_sum", [1 / 30, 1 / 30, 1 / 30]),
        ("sequence_token_sum", [1 / 3, 1 / 3, 1 / 3]),
        ("token_sum_norm", [1 / 10, 1 / 10, 1 / 10]),
        ("prompt_mean", [1 / 16, 1 / 16, 1 / 8]),
    ],
)
def test_by_hand(aggregation: str, expected: list[float]) -> None:
    batch = make_batch([0.0] * 3, [4, 4, 2], LENGTHS)
    weights = loss_weights(batch, aggregation, max_tokens=10)
    assert weights[batch.offsets[1:] - 1].tolist() == pytest.approx(expected)
    assert not weights[~batch["response_mask"]].any()
    assert weights.dtype == torch.float32


@settings(max_examples=50, deadline=None)
@given(steps(), st.sampled_from(list(Aggregation)))
def test_equals_the_papers_sum_over_rows(batch: Batch, aggregation: Aggregation) -> None:
    """The weighed sum of any per-token loss is the nested mean that the papers write."""
    loss = torch.randn(batch.num_tokens).double()
    batch = overlong_filter(batch)
    valid, mask, truncated = batch["valid"].numpy(), batch["response_mask"].numpy(), batch["truncated"].numpy()
    row = batch.row_of_token.numpy()
    rows, by_prompt = [], defaultdict(list)
    for b in range(batch.num_rows):
        tokens = loss.numpy()[(row == b) & mask]
        if valid[b] and not truncated[b] and len(tokens):
            rows.append(tokens)
            by_prompt[int(batch["uid"][b])].append(tokens)
    expected = {
        "token_mean": lambda: np.concatenate(rows).mean(),
        "sequence_mean": lambda: np.mean([tokens.mean() for tokens in rows]),
        "sequence_sum": lambda: sum(tokens.sum() for tokens in rows) / (len(rows) * 9),
        "sequence_token_sum": lambda: np.mean([tokens.sum() for tokens in rows]),
        "token_sum_norm": lambda: sum(tokens.sum() for tokens in rows) / 9,
        "prompt_mean": lambda: np.mean([np.concatenate(group).mean() for group in by_prompt.values()]),
        "row_mean": lambda: np.mean([tokens.mean() for tokens in rows]),
    }[aggregation.value]
    found = float((loss * loss_weights(batch, aggregation, max_tokens=9)).sum())
    assert found == pytest.approx(expected() if rows else 0.0, rel=1e-4, abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(steps(), st.sampled_from(["token_mean", "sequence_mean", "prompt_mean"]))
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


@pytest.mark.parametrize("name", ["sequence_sum", "token_sum_norm"])
def test_an_aggregation_with_a_constant_needs_it(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' divides by max_tokens, which is None"):
        loss_weights(make_batch([0.0], [0]), name)


def test_an_aggregation_of_ones_own_is_cut_to_what_counts() -> None:
    """Whatever it says of other tokens, NaN included."""

    def halves(batch: Batch, counted: torch.Tensor, max_tokens: int | None) -> torch.Tensor:
        assert max_tokens == 7
        return torch.where(counted, 0.5, torch.nan).double()

    batch = make_batch([0.0, 0.0], [0, 0], valid=[True, False])
    assert loss_weights(batch, halves, max_tokens=7).tolist() == [0, 0.5, 0.5, 0, 0, 0]


def test_the_registered_aggregations_are_the_built_in_ones() -> None:
    registry = Registry.discover({})
    names = registry.usable(ComponentKind.AGGREGATION)
    assert {name: registry.function(ComponentKind.AGGREGATION, name) for name in names} == dict(AGGREGATIONS)
    assert set(names) == set(map(str, Aggregation))


# Top-entropy tokens


def uncertain(entropy: list[float]) -> Batch:
    """Two rows of one prompt token and half of these each."""
    half = len(entropy) // 2
    batch = make_batch([0.0, 0.0], [0, 0], [(1, half), (1, half)])
    spread = torch.full((batch.num_tokens,), 99.0)
    spread[batch["response_mask"]] = torch.tensor(entropy)
    batch = batch.with_tokens(entropy=spread)
    return batch.with_tokens(loss_weight=loss_weights(batch))


def test_only_the_most_uncertain_tokens_keep_their_weight() -> None:
    batch = uncertain([0.1, 0.9, 0.2, 0.3, 0.8, 0.4, 0.7, 0.5, 0.6, 0.0])
    found = keep_top_entropy(batch, 0.2)["loss_weight"][batch["response_mask"]]
    assert found.tolist() == pytest.approx([0, 0.1, 0, 0, 0.1, 0, 0, 0, 0, 0])
    assert torch.equal(keep_top_entropy(batch, 1.0)["loss_weight"], batch["loss_weight"])


def test_tokens_at_the_threshold_are_kept_all_of_them() -> None:
    batch = uncertain([0.5, 0.5, 0.5, 0.1])
    assert int((keep_top_entropy(batch, 0.25)["loss_weight"] > 0).sum()) == 3


def test_tokens_without_weight_have_no_say_in_the_threshold() -> None:
    batch = uncertain([9.0, 9.0, 0.1, 0.2])
    batch = batch.with_rows(valid=torch.tensor([False, True]))
    batch = batch.with_tokens(loss_weight=loss_weights(batch), entropy=batch["entropy"].nan_to_num(99.0, 99.0))
    kept = keep_top_entropy(batch, 0.5)["loss_weight"]
    assert kept.tolist() == pytest.approx([0, 0, 0, 0, 0, 0.5])


@settings(max_examples=50, deadline=None)
@given(steps(), st.floats(0.01, 1.0))
def test_top_entropy_equals_a_sort(batch: Batch, share: float) -> None:
    batch = batch.with_tokens(loss_weight=loss_weights(batch))
    counted = [float(e) for e, w in zip(batch["entropy"], batch["loss_weight"], strict=True) if w > 0]
    kept = keep_top_entropy(batch, share)["loss_weight"] > 0
    expected = sorted(counted, reverse=True)[: max(1, round(share * len(counted)))]
    assert sorted(batch["entropy"][kept].tolist(), reverse=True) == expected


@pytest.mark.parametrize("share", [0.0, 1.5, float("nan")])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="top-entropy share is"):
        keep_top_entropy(uncertain([0.1, 0.2]), share)
