"""Chains and factors of rows, against the plain formulas: loops over single tokens."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.algorithms import AGGREGATIONS, Aggregation, group_signal, loss_weights, token_level_rewards
from rlsdk.algorithms.advantages.group import dr_grpo, gpg, grpo, grpo_passk, opo, rloo
from rlsdk.algorithms.advantages.normalized import reinforce_plus_plus_baseline
from rlsdk.algorithms.advantages.temporal import gae, reinforce, remax
from rlsdk.algorithms.lengths import length_penalty
from rlsdk.interfaces import Batch, BatchError

Key = tuple[int, int]
"""uid and sample."""


def batch_of(seed: int) -> Batch:
    """Samples of one to four rows in up to three chains, in any order of rows."""
    rng = np.random.default_rng(seed)
    uid, sample, chain = [], [], []
    for prompt in range(2):
        for index in range(rng.integers(1, 4)):
            for _ in range(rng.integers(1, 5)):
                uid.append(prompt)
                sample.append(index)
                chain.append(int(rng.integers(0, 3)))
    count = len(uid)
    batch = Batch.from_rows(
        [rng.integers(1, 9, rng.integers(2, 7)).tolist() for _ in range(count)],
        row_id=torch.from_numpy(rng.permutation(count)),
        uid=torch.tensor(uid),
        sample=torch.tensor(sample),
        chain=torch.tensor(chain),
        row_scale=torch.from_numpy(rng.choice([1.0, 0.5, 3.0], count)),
    )
    of_sample = {key: (rng.normal(), bool(rng.random() < 0.8)) for key in zip(uid, sample, strict=True)}
    scores, valid = zip(*(of_sample[key] for key in zip(uid, sample, strict=True)), strict=True)
    mask = torch.from_numpy(rng.random(batch.num_tokens) < 0.6) & (batch.position_ids > 0)
    values = torch.from_numpy(rng.normal(size=batch.num_tokens)).float()
    tokens = torch.from_numpy(np.where(mask, rng.normal(size=batch.num_tokens), 0.0))
    batch = batch.with_rows(scores=torch.tensor(scores, dtype=torch.float64), valid=torch.tensor(valid))
    return token_level_rewards(batch.with_tokens(response_mask=mask, values=values, token_scores=tokens))


def times(batch: Batch) -> dict[tuple[Key, int], list[int]]:
    """Positions of the sampled tokens of each chain of valid samples, in time."""
    found: dict[tuple[Key, int], list[int]] = defaultdict(list)
    offsets = batch.offsets.tolist()
    for row in batch["row_id"].argsort().tolist():
        key = (int(batch["uid"][row]), int(batch["sample"][row]))
        for at in range(offsets[row], offsets[row + 1]):
            if batch["response_mask"][at] and batch["valid"][row]:
                found[key, int(batch["chain"][row])].append(at)
    return found


def plain_gae(batch: Batch, gamma: float, lam: float, score: str = "scores") -> torch.Tensor:
    out = torch.zeros(batch.num_tokens, dtype=torch.float64)
    rows = batch.row_of_token
    for positions in times(batch).values():
        following, value = 0.0, 0.0
        for last, at in enumerate(reversed(positions)):
            reward = float(batch["token_scores"][at].float()) + (
                float(batch[score][rows[at]].float()) if last == 0 else 0.0
            )
            now = float(batch["values"][at])
            following = reward + gamma * value - now + gamma * lam * following
            out[at], value = following, now
    return out


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(1.0, 1.0), (0.9, 0.7), (1.0, 0.0)]))
def test_time_goes_along_each_chain_with_the_score_at_its_end(seed: int, rates: tuple[float, float]) -> None:
    gamma, lam = rates
    batch = batch_of(seed)
    found = gae(batch, gamma=gamma, lam=lam, normalize=False)["advantages"]
    torch.testing.assert_close(found.double(), plain_gae(batch, gamma, lam), rtol=1e-4, atol=1e-5)
    zero = batch.with_tokens(values=torch.zeros(batch.num_tokens))
    expected = plain_gae(zero, gamma, 1.0)
    torch.testing.assert_close(reinforce(batch, gamma=gamma)["advantages"].double(), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_group_counts_a_score_once_however_many_chains_a_sample_has(seed: int) -> None:
    batch = batch_of(seed)
    alone = Batch(
        lengths=batch.lengths, tokens=batch.tokens, rows={k: v for k, v in batch.rows.items() if k != "chain"}
    )
    torch.testing.assert_close(dr_grpo(batch)["advantages"], dr_grpo(alone)["advantages"], rtol=0, atol=0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(list(Aggregation)))
def test_weights_of_rows_with_factors_are_those_of_the_formulas(seed: int, aggregation: Aggregation) -> None:
    batch, most = batch_of(seed), 7
    rows = batch.row_of_token.tolist()
    counted = [bool(m) and bool(batch["valid"][row]) for m, row in zip(batch["response_mask"], rows, strict=True)]
    scale = [float(one) for one in batch["row_scale"]]
    keys = list(zip(batch["uid"].tolist(), batch["sample"].tolist(), strict=True))
    total, by_row, by_sample, by_prompt = 0.0, defaultdict(float), defaultdict(float), defaultdict(float)
    for at, row in enumerate(rows):
        if counted[at]:
            total += scale[row]
            by_row[row] += 1
            by_sample[keys[row]] += scale[row]
            by_prompt[keys[row][0]] += scale[row]
    by_row, by_sample, by_prompt = map(dict, (by_row, by_sample, by_prompt))
    expected = []
    for at, row in enumerate(rows):
        if not counted[at]:
            expected.append(0.0)
            continue
        key = keys[row]
        divisors = {
            "token_mean": total,
            "sequence_mean": len(by_sample) * by_sample[key],
            "sequence_sum": len(by_sample) * most,
            "sequence_token_sum": len(by_sample),
            "token_sum_norm": most,
            "prompt_mean": len(by_prompt) * by_prompt[key[0]],
            "row_mean": len(by_row) * by_row[row],
        }
        expected.append(scale[row] / divisors[aggregation.value])
    found = loss_weights(batch, aggregation, max_tokens=most).tolist()
    assert found == pytest.approx(expected, rel=1e-5)


def test_row_mean_depends_on_the_cut() -> None:
    """[0.25 x 4] of two samples of two tokens, of which one is cut in two."""
    rows = [[1, 5, 6], [1, 7], [1, 7, 8]]
    batch = Batch.from_rows(rows, uid=torch.tensor([0, 0, 0]), sample=torch.tensor([0, 1, 1]))
    mask = torch.tensor([False, True, True, False, True, False, False, True])
    weights = {
        name: loss_weights(batch.with_tokens(response_mask=mask), name, max_tokens=2)[mask] for name in AGGREGATIONS
    }
    assert weights["sequence_mean"].tolist() == [0.25] * 4
    assert weights["row_mean"].tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 3, 1 / 3])


def with_chain_scores(batch: Batch, seed: int) -> Batch:
    """The batch with a score of its own for every chain."""
    rng = np.random.default_rng(seed + 1)
    own: dict[tuple[Key, int], float] = defaultdict(lambda: float(rng.choice([0.0, 1.0, -1.0])))
    scores = [float(batch["scores"][row]) + own[chain_of(batch, row)] for row in range(batch.num_rows)]
    return token_level_rewards(batch.with_rows(chain_scores=torch.tensor(scores, dtype=torch.float64)))


def chain_of(batch: Batch, row: int) -> tuple[Key, int]:
    return (int(batch["uid"][row]), int(batch["sample"][row])), int(batch["chain"][row])


def plain_group_advantages(batch: Batch, *, divides: bool) -> torch.Tensor:
    """Each chain against the chains of its number of the valid samples of its prompt."""
    totals: dict[tuple[Key, int], float] = {}
    for row in range(batch.num_rows):
        if batch["valid"][row]:
            totals.setdefault(chain_of(batch, row), float(batch["chain_scores"][row]))
    spoken = set()
    for at, row in enumerate(batch.row_of_token.tolist()):
        key = chain_of(batch, row)
        if key in totals and batch["response_mask"][at]:
            spoken.add(key)
            totals[key] += float(batch["token_scores"][at])
    totals = {key: value if key in spoken else 0.0 for key, value in totals.items()}  # no token has its score
    groups: dict[tuple[int, int], list[float]] = defaultdict(list)
    for ((uid, _), chain), total in totals.items():
        groups[uid, chain].append(total)
    out = torch.zeros(batch.num_tokens, dtype=torch.float64)
    for at, row in enumerate(batch.row_of_token.tolist()):
        key = chain_of(batch, row)
        if key not in totals or not batch["response_mask"][at]:
            continue
        values = np.array(groups[key[0][0], key[1]])
        centred = totals[key] - values.mean()
        if len(values) > 1:
            out[at] = centred / (values.std(ddof=1) + 1e-6) if divides else centred
    return out


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_chains_with_scores_are_compared_with_the_same_chain_of_other_samples(seed: int) -> None:
    batch = with_chain_scores(batch_of(seed), seed)
    for estimate, divides in ((dr_grpo, False), (grpo, True)):
        expected = plain_group_advantages(batch, divides=divides)
        torch.testing.assert_close(estimate(batch)["advantages"].double(), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(1.0, 1.0), (0.9, 0.7)]))
def test_time_goes_along_each_chain_to_its_own_score(seed: int, rates: tuple[float, float]) -> None:
    gamma, lam = rates
    batch = with_chain_scores(batch_of(seed), seed)
    found = gae(batch, gamma=gamma, lam=lam, normalize=False)["advantages"]
    torch.testing.assert_close(found.double(), plain_gae(batch, gamma, lam, score="chain_scores"), rtol=1e-4, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_scores_of_chains_change_no_weight_and_no_number_where_each_sample_is_one_chain(seed: int) -> None:
    batch = batch_of(seed)
    for name in AGGREGATIONS:
        weights = [loss_weights(one, name, max_tokens=7) for one in (batch, with_chain_scores(batch, seed))]
        assert torch.equal(*weights)
    plain = batch.with_rows(chain=torch.zeros_like(batch["chain"]))
    alone = plain.with_rows(chain_scores=plain["scores"])
    for estimate in (grpo, dr_grpo, rloo, opo, gpg, grpo_passk, reinforce_plus_plus_baseline, gae):
        before, after = (estimate(token_level_rewards(one))["advantages"] for one in (plain, alone))
        assert torch.equal(before, after)


def test_a_group_has_signal_where_one_of_its_chains_has() -> None:
    """Two games that the players won in turn, and two that the first won both times: equal sums, unlike chains."""
    rows = [[1, 2]] * 8
    batch = Batch.from_rows(
        rows, uid=torch.tensor([5] * 4 + [3] * 4), sample=torch.tensor([0, 0, 1, 1] * 2),
        chain=torch.tensor([0, 1] * 4), scores=torch.zeros(8, dtype=torch.float64),
    ).with_tokens(response_mask=torch.tensor([False, True] * 8))  # fmt: skip
    assert not group_signal(batch).has_signal.any()
    own = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    found = group_signal(batch.with_rows(chain_scores=own))
    assert (found.uid.tolist(), found.num_valid.tolist(), found.has_signal.tolist()) == (
        [3, 5], [2, 2], [False, True],
    )  # fmt: skip


def test_what_is_added_to_the_score_of_a_sample_is_added_to_its_chains() -> None:
    batch = with_chain_scores(batch_of(3), 3)
    longer = length_penalty(batch, coef=0.5)
    change = longer["scores"] - batch["scores"]
    assert (change < 0).any()
    torch.testing.assert_close(longer["chain_scores"] - batch["chain_scores"], change)


def test_a_greedy_baseline_is_of_a_whole_sample() -> None:
    batch = with_chain_scores(batch_of(3), 3)
    with pytest.raises(BatchError, match="chains have scores of their own"):
        remax(batch.with_rows(baseline_scores=torch.zeros_like(batch["scores"])))
