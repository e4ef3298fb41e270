"""Cutting and weighing rows: nothing lost, nothing swapped, nothing drawn from hidden state."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.rollouts import request_seed
from rlsdk.trainer.learner.mini_batches import cut_mini_batches, make_sft_batch, scatter_loss_weights


@given(st.integers(1, 50), st.integers(1, 8), st.integers(0, 5))
def test_mini_batches_hold_every_row_once_and_differ_by_one_row_at_most(rows: int, parts: int, seed: int) -> None:
    cut = cut_mini_batches(torch.arange(rows), parts, seed=(seed,))
    assert sorted(torch.cat(cut).tolist()) == list(range(rows))
    sizes = [len(part) for part in cut]
    assert len(cut) == parts
    assert max(sizes) - min(sizes) <= 1
    again = cut_mini_batches(torch.arange(rows), parts, seed=(seed,))
    assert all(torch.equal(a, b) for a, b in zip(cut, again, strict=True))


def test_seeds_depend_on_every_part_and_on_nothing_else() -> None:
    seeds = {
        request_seed(run, name, step, at)
        for run in range(3)
        for name in ("a", "b")
        for step in range(5)
        for at in range(5)
    }
    assert len(seeds) == 3 * 2 * 5 * 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(1, "train", 2, 3) == 8573780293393194795


def test_supervised_rows_learn_the_answer_alone() -> None:
    batch = make_sft_batch([[1, 2], [3]], [[4], [5, 6]]).validate()
    assert batch["input_ids"].tolist() == [1, 2, 4, 3, 5, 6]
    assert batch["response_mask"].tolist() == [False, False, True, False, True, True]


@given(st.lists(st.integers(1, 5), min_size=2, max_size=10), st.integers(1, 2))
def test_loss_weights_stand_with_their_own_rows(lengths: list[int], parts: int) -> None:
    prompts = [[row] for row in range(len(lengths))]
    batch = make_sft_batch(prompts, [[0] * length for length in lengths])
    cut = cut_mini_batches(torch.arange(len(lengths)), parts, seed=(0,))
    weights = [batch.select(rows)["input_ids"].float() + 1 for rows in cut]
    assert torch.equal(scatter_loss_weights(batch, cut, weights)["loss_weight"], batch["input_ids"].float() + 1)
