"""What length does to a score, which groups have signal, and the average of weights."""

import math
from typing import Any

import pytest
import torch
from algorithm_cases import make_batch, plain_rows, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk import algorithms as alg
from rlsdk.interfaces import Batch, ConfigError

LENGTHS = [(1, 4), (2, 8), (1, 9), (1, 10), (3, 12)]


def of_lengths(scores: list[float] | None = None) -> Batch:
    return make_batch(scores or [0.0] * 5, [3] * 5, LENGTHS)


def test_the_soft_punishment_is_daposs_equation_13() -> None:
    """L_max 10, L_cache 4: nothing up to 6, then a quarter per token."""
    found = alg.overlong_punishment(of_lengths(), max_tokens=10, cache_tokens=4)["scores"]
    assert found.tolist() == pytest.approx([0.0, -0.5, -0.75, -1.0, -1.0])
    harder = alg.overlong_punishment(of_lengths([1.0] * 5), max_tokens=10, cache_tokens=4, factor=2.0)["scores"]
    assert harder.tolist() == pytest.approx([1.0, 0.0, -0.5, -1.0, -1.0])


def test_a_tools_tokens_are_nobodys_length() -> None:
    batch = make_batch([0.0], [0], [(1, 10)])
    batch = batch.with_tokens(response_mask=batch["response_mask"] & (batch.position_ids % 2 == 0))
    assert alg.overlong_punishment(batch, max_tokens=10, cache_tokens=4)["scores"].tolist() == [0.0]


def test_the_linear_penalty_by_hand() -> None:
    found = alg.length_penalty(of_lengths(), coef=0.1, free_tokens=8, max_penalty=0.3)["scores"]
    assert found.tolist() == pytest.approx([0.0, 0.0, -0.1, -0.2, -0.3])
    assert alg.length_penalty(of_lengths(), coef=0.1)["scores"][4].item() == pytest.approx(-1.2)


def test_the_relative_length_reward_by_hand() -> None:
    """Lengths 4 to 12: l = .5, 0, -.125, -.25, -.5; wrong answers gain nothing for being short."""
    found = alg.relative_length_reward(of_lengths([0.0, 1.0, 1.0, 0.0, 1.0]))["scores"]
    assert found.tolist() == pytest.approx([0.0, 1.0, 0.875, -0.25, 0.5])
    failed = of_lengths([1.0] * 5).with_rows(valid=torch.tensor([True, True, True, True, False]))
    found = alg.relative_length_reward(failed, coef=2.0)["scores"]
    assert found.tolist() == pytest.approx([2.0, 1 + 2 * (0.5 - 4 / 6), 1 + 2 * (0.5 - 5 / 6), 0.0, 1.0])
    assert alg.relative_length_reward(make_batch([1.0, 1.0], [0, 0]))["scores"].tolist() == [1.0, 1.0]


@settings(max_examples=50, deadline=None)
@given(steps())
def test_penalties_equal_plain_python(batch: Batch) -> None:
    lengths = [row.length for row in plain_rows(batch)]
    soft = alg.overlong_punishment(batch, max_tokens=5, cache_tokens=3)["scores"] - batch["scores"]
    expected = [0.0 if n <= 2 else max((2 - n) / 3, -1.0) for n in lengths]
    torch.testing.assert_close(soft, torch.tensor(expected, dtype=torch.float64))
    linear = alg.length_penalty(batch, coef=0.5, free_tokens=2)["scores"] - batch["scores"]
    expected = [-0.5 * max(n - 2, 0) for n in lengths]
    torch.testing.assert_close(linear, torch.tensor(expected, dtype=torch.float64))


def test_truncated_rows_carry_no_loss_and_keep_their_say_in_the_group() -> None:
    batch = make_batch([1.0, 0.0], [0, 0], truncated=[False, True])
    batch = alg.overlong_filter(batch)
    assert batch["trained"].tolist() == [True, False]
    assert alg.dr_grpo(batch)["advantages"][[1, 4]].tolist() == [0.5, -0.5]
    assert alg.loss_weights(batch).tolist() == [0, 0.5, 0.5, 0, 0, 0]
    again = alg.overlong_filter(batch.with_rows(trained=torch.tensor([False, True])))
    assert again["trained"].tolist() == [False, False]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: alg.overlong_punishment(b, max_tokens=4, cache_tokens=0), "cache_tokens is 0"),
        (lambda b: alg.overlong_punishment(b, max_tokens=4, cache_tokens=5), "cache_tokens is 5"),
        (lambda b: alg.overlong_punishment(b, max_tokens=4, cache_tokens=2, factor=-1.0), "factor is -1.0"),
        (lambda b: alg.length_penalty(b, coef=-0.1), "coef is -0.1"),
        (lambda b: alg.length_penalty(b, coef=0.1, free_tokens=-1), "free_tokens is -1"),
    ],
)
def test_penalties_out_of_range_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(of_lengths())


# Groups with signal


@pytest.mark.parametrize(
    ("scores", "valid", "expected"),
    [
        ([1.0, 0.0], [True, True], True),
        ([1.0, 1.0], [True, True], False),
        ([1.0, 1.0, 0.0], [True, True, False], False),
        ([1.0, math.nan, 0.0], [True, False, True], True),
        ([1.0], [True], False),
        ([1.0, 0.0], [True, False], False),
        ([1.0, 0.0], [False, False], False),
        ([], [], False),
    ],
)
def test_a_group_has_signal_where_valid_scores_differ(scores: list[float], valid: list[bool], expected: bool) -> None:
    """A failed row counted as 0, so that one failure among equals was signal."""
    assert alg.has_signal(torch.tensor(scores), torch.tensor(valid, dtype=torch.bool)) is expected
    if scores:
        found = alg.group_signal(make_batch(scores, [-7] * len(scores), valid=valid))
        assert found.has_signal.tolist() == [expected]
        assert found.uid.tolist() == [-7]
        assert found.num_valid.tolist() == [sum(valid)]
        assert found.share == float(expected)


def test_a_spread_may_be_asked_for() -> None:
    scores = torch.tensor([0.5, 0.75])
    assert alg.has_signal(scores)
    assert not alg.has_signal(scores, min_spread=0.25)
    assert alg.has_signal(scores, min_spread=0.2)


@settings(max_examples=40, deadline=None)
@given(steps(), st.sampled_from([0.0, 0.5]))
def test_signal_equals_plain_python_and_decides_whether_there_are_advantages(batch: Batch, spread: float) -> None:
    batch = batch.with_rows(scores=torch.where(batch["valid"], batch["scores"], torch.nan))
    found = alg.group_signal(batch, min_spread=spread)
    for uid, signal in zip(found.uid.tolist(), found.has_signal.tolist(), strict=True):
        members = batch["uid"] == uid
        scores = batch["scores"][members & batch["valid"]].tolist()
        assert signal == (len(scores) > 1 and max(scores) - min(scores) > spread)
        assert signal == alg.has_signal(batch["scores"][members], batch["valid"][members], min_spread=spread)
    if spread == 0 and bool((batch.row_sum(batch["response_mask"].long()) > 0).all()):
        teaching = alg.dr_grpo(alg.token_level_rewards(batch))["advantages"].any()
        assert bool(teaching) == bool(found.has_signal.any())


def test_no_groups_have_no_share() -> None:
    assert alg.group_signal(make_batch([1.0], [0]).select(slice(0, 0))).share == 0.0


# The average of weights


def test_the_average_moves_by_its_share_in_place() -> None:
    average = {"w": torch.zeros(3), "b": torch.ones(1)}
    kept = average["w"]
    for _ in range(2):
        alg.update_average(average, {"w": torch.ones(3, dtype=torch.bfloat16), "b": torch.zeros(1)}, 0.9)
    assert kept.tolist() == pytest.approx([0.19] * 3)
    assert average["b"].tolist() == pytest.approx([0.81])


def test_decay_zero_copies_and_one_keeps() -> None:
    average, weights = {"w": torch.randn(5)}, {"w": torch.randn(5)}
    before = average["w"].clone()
    alg.update_average(average, weights, 1.0)
    assert torch.equal(average["w"], before)
    alg.update_average(average, weights, 0.0)
    assert torch.equal(average["w"], weights["w"])


def test_other_names_or_another_decay_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"differ in 2 names, the first \['a', 'b'\]"):
        alg.update_average({"a": torch.zeros(1)}, {"b": torch.zeros(1)}, 0.9)
    with pytest.raises(ConfigError, match=r"ema decay is 1\.1"):
        alg.update_average({}, {}, 1.1)
