"""Chains and factors of rows, against the plain formulas: loops over single tokens."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.algorithms import AGGREGATIONS, Aggregation, loss_weights, token_level_rewards
from rlsdk.algorithms.advantages.group import dr_grpo
from rlsdk.algorithms.advantages.temporal import gae, reinforce
from rlsdk.interfaces import Batch

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


def plain_gae(batch: Batch, gamma: float, lam: float) -> torch.Tensor:
    out = torch.zeros(batch.num_tokens, dtype=torch.float64)
    rows = batch.row_of_token
    for positions in times(batch).values():
        following, value = 0.0, 0.0
        for last, at in enumerate(reversed(positions)):
            reward = float(batch["token_scores"][at].float()) + (
                float(batch["scores"][rows[at]].float()) if last == 0 else 0.0
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
