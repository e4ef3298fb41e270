"""Rollout correction, the numbers of a mismatch, and which rows are stale."""

import math
from typing import Any

import pytest
import torch
from algorithm_cases import PlainRow, flat, make_batch, plain_rows, poison, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.algorithms import correct_rollout, count_stale, loss_weights, mismatch, reject_rows
from rlsdk.interfaces import Batch, BatchError, ConfigError


def ratios(values: list[list[float]]) -> Batch:
    """Rows of one prompt token and responses with these ratios old / rollout."""
    batch = make_batch([0.0] * len(values), [0] * len(values), [(1, len(row)) for row in values])
    old = torch.zeros(batch.num_tokens)
    old[batch["response_mask"]] = torch.tensor([math.log(r) for row in values for r in row])
    return batch.with_tokens(old_log_probs=old - 1.0, rollout_log_probs=torch.full((batch.num_tokens,), -1.0))


def weights(batch: Batch, **options: Any) -> list[float]:
    """On response tokens."""
    return correct_rollout(batch, **options)["rollout_weight"][batch["response_mask"]].tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [2.0, 0.5, 1.5]),
        ({"lower": 0.8}, [2.0, 0.8, 1.5]),
        ({"mode": "mask"}, [0.0, 0.5, 1.5]),
        ({"mode": "mask", "lower": 0.8}, [0.0, 0.0, 1.5]),
        ({"level": "sequence"}, [2.0, 2.0, 1.5]),
        ({"level": "sequence", "upper": 9.0}, [2.5, 2.5, 1.5]),
        ({"level": "sequence", "mode": "mask"}, [0.0, 0.0, 1.5]),
        ({"level": "geometric"}, [2.5**0.5, 2.5**0.5, 1.5]),
        ({"level": "geometric", "upper": 1.55}, [1.55, 1.55, 1.5]),
    ],
)
def test_weights_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    """Ratios 5 and 1/2 in one response, 1.5 in the other."""
    assert weights(ratios([[5.0, 0.5], [1.5]]), **options) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"level": "geometric", "lower": 0.5, "upper": 2.0}, [True, True, True]),
        ({"level": "geometric"}, [False, False, True]),
        ({"level": "sequence", "lower": 0.5, "upper": 2.0}, [False, True, True]),
        ({"level": "token", "lower": 0.6, "upper": 9.0}, [False, True, True]),
    ],
)
def test_rejected_rows_carry_no_loss_and_are_not_counted(options: dict[str, Any], kept: list[bool]) -> None:
    batch = reject_rows(ratios([[5.0, 0.5], [1.5], []]), **options)
    assert batch["trained"].tolist() == kept
    shares = batch.row_sum(loss_weights(batch, "sequence_mean"))
    counted = [k and n > 1 for k, n in zip(kept, batch.lengths.tolist(), strict=True)]
    assert shares.tolist() == pytest.approx([c / max(sum(counted), 1) for c in counted])


def test_rejection_adds_to_what_was_left_out_before() -> None:
    batch = ratios([[1.0], [1.0], [9.0]]).with_rows(trained=torch.tensor([False, True, True]))
    assert reject_rows(batch)["trained"].tolist() == [False, True, False]


def log_ratios(row: PlainRow) -> list[float]:
    pairs = zip(row.fields["old_log_probs"], row.fields["rollout_log_probs"], strict=True)
    return [old - rollout for old, rollout in pairs]


@settings(max_examples=50, deadline=None)
@given(steps(), st.sampled_from(["token", "sequence", "geometric"]), st.sampled_from(["truncate", "mask"]))
def test_weights_equal_plain_python(batch: Batch, level: str, mode: str) -> None:
    found = correct_rollout(batch, level=level, mode=mode, upper=1.3, lower=0.4)["rollout_weight"]
    expected = []
    for row in plain_rows(batch):
        of = log_ratios(row)
        if level != "token":
            of = [math.fsum(of) / (1 if level == "sequence" else max(len(of), 1))] * len(of)
        raw = [math.exp(x) for x in of]
        cut = (
            [min(max(r, 0.4), 1.3) for r in raw] if mode == "truncate" else [r if 0.4 <= r <= 1.3 else 0.0 for r in raw]
        )
        expected.append(cut)
    torch.testing.assert_close(found, flat(batch, expected), rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(steps(), st.sampled_from(["token", "sequence", "geometric"]))
def test_what_stands_off_the_mask_changes_nothing_not_even_nan(batch: Batch, level: str) -> None:
    noisy = poison(batch, "old_log_probs", "rollout_log_probs")
    for function in (correct_rollout, reject_rows):
        clean, found = function(batch, level=level), function(noisy, level=level)
        name = "rollout_weight" if function is correct_rollout else "trained"
        assert torch.equal(clean[name], found[name])
    clean_numbers = mismatch(batch, batch["old_log_probs"], batch["rollout_log_probs"])
    noisy_numbers = mismatch(noisy, noisy["old_log_probs"], noisy["rollout_log_probs"])
    if batch["response_mask"].any():
        assert clean_numbers == noisy_numbers


def test_impossible_tokens_stay_finite() -> None:
    """A token to which one of the engines gives no probability."""
    batch = ratios([[1.0, 1.0]]).with_tokens(old_log_probs=torch.tensor([0.0, -torch.inf, -1.0]))
    assert weights(batch, level="sequence") == pytest.approx([0.0, 0.0], abs=1e-8)
    batch = batch.with_tokens(old_log_probs=torch.zeros(3), rollout_log_probs=torch.tensor([0.0, -torch.inf, 0.0]))
    assert weights(batch) == [2.0, 1.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "tokens"}, r"correction level 'tokens'; did you mean 'token'\?"),
        ({"mode": "clip"}, "correction mode 'clip'"),
        ({"upper": 0.5, "lower": 0.5}, "expected 0 <= lower < upper"),
        ({"lower": -1.0}, "lower -1.0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        correct_rollout(ratios([[1.0]]), **options)


# Numbers of a mismatch


def test_mismatch_by_hand() -> None:
    """Train / rollout of tokens 2, 1/2 and 1; of responses 1 and 1."""
    batch = ratios([[2.0, 0.5], [1.0]])
    found = mismatch(batch, batch["old_log_probs"], batch["rollout_log_probs"])
    assert found.kl_k1 == pytest.approx(0.0, abs=1e-7)
    assert found.kl_k3 == pytest.approx((2 + 0.5 + 1 - 3) / 3, rel=1e-6)
    assert found.ess_token == pytest.approx(3.5**2 / (3 * 5.25), rel=1e-6)
    assert found.ess_sequence == pytest.approx(1.0)
    assert (found.ratio_max, found.ratio_min) == pytest.approx((2.0, 0.5))
    assert found.perplexity_rollout == pytest.approx(math.e)
    assert found.perplexity_train == pytest.approx(math.e)


@settings(max_examples=50, deadline=None)
@given(steps())
def test_mismatch_equals_plain_python(batch: Batch) -> None:
    found = mismatch(batch, batch["old_log_probs"], batch["rollout_log_probs"])
    rows = [row for row in plain_rows(batch) if row.length]
    d = [x for row in rows for x in log_ratios(row)]
    if not d:
        assert all(math.isnan(value) for value in found.metrics().values())
        return

    def ess(logs: list[float]) -> float:
        w = [math.exp(x) for x in logs]
        return sum(w) ** 2 / (len(w) * sum(x * x for x in w))

    assert found.kl_k1 == pytest.approx(-math.fsum(d) / len(d), rel=1e-4, abs=1e-6)
    assert found.kl_k3 == pytest.approx(sum(math.exp(x) - 1 - x for x in d) / len(d), rel=1e-3, abs=1e-6)
    assert found.ess_token == pytest.approx(ess(d), rel=1e-5)
    assert found.ess_sequence == pytest.approx(ess([math.fsum(log_ratios(row)) for row in rows]), rel=1e-5)
    train = [x for row in rows for x in row.fields["old_log_probs"]]
    assert found.perplexity_train == pytest.approx(math.exp(-math.fsum(train) / len(train)), rel=1e-5)


def test_one_response_that_owns_all_weight_is_seen() -> None:
    batch = ratios([[1.0] * 4] * 10)
    lucky = batch["old_log_probs"].clone()
    lucky[1:5] += 500.0
    assert mismatch(batch, lucky, batch["rollout_log_probs"]).ess_sequence == pytest.approx(0.1)


# Which rows are stale


def of_versions(first: list[int], last: list[int]) -> Batch:
    batch = make_batch([0.0] * len(first), [0] * len(first))
    return batch.with_rows(
        policy_version=torch.tensor(first, dtype=torch.int64), last_policy_version=torch.tensor(last, dtype=torch.int64)
    )


def test_a_row_is_stale_if_any_of_its_tokens_is() -> None:
    assert count_stale(of_versions([5, 3, 5], [5, 5, 5]), 5) == 1
    assert count_stale(of_versions([5, 5], [5, 5]), 5) == 0
    assert count_stale(of_versions([5, 5], [5, 5]).select([]), 5) == 0


def test_versions_that_cannot_be_are_refused() -> None:
    with pytest.raises(BatchError, match="a row is of version 6, newer than the current 5"):
        count_stale(of_versions([5], [6]), 5)
    with pytest.raises(BatchError, match="row 1 begins at version 4 and ends at 3"):
        count_stale(of_versions([5, 4], [5, 3]), 5)
