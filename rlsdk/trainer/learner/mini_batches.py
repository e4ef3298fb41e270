"""Splitting and weighting the rows of a step: pure functions, no engine and no Ray."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlsdk.algorithms import Samples, length_penalty, overlong_punishment, relative_length_reward
from rlsdk.config import LengthConfig
from rlsdk.data import LearnedRow
from rlsdk.interfaces import Batch
from rlsdk.rollouts import request_seed


def make_sft_batch(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Batch:
    """Rows of prompt and answer; `response_mask` is True on the answer tokens, which are trained on."""
    batch = Batch.from_rows([[*p, *a] for p, a in zip(prompts, answers, strict=True)])
    starts = torch.tensor([len(p) for p in prompts])
    return batch.with_tokens(response_mask=batch.position_ids >= torch.repeat_interleave(starts, batch.lengths))


def make_rows_batch(rows: Sequence[LearnedRow]) -> Batch:
    """As `make_sft_batch`, for rows with any number of learned spans."""
    batch = Batch.from_rows([row.token_ids for row in rows])
    mask = torch.zeros(batch.num_tokens, dtype=torch.bool)
    start = 0
    for row in rows:
        for first, end in row.learned:
            mask[start + first : start + end] = True
        start += len(row.token_ids)
    return batch.with_tokens(response_mask=mask)


def cut_mini_batches(whole: Tensor, num_parts: int, *, seed: Sequence[int | str]) -> list[Tensor]:
    """Row indices of each mini-batch: a random cut into parts whose sizes differ by one at most. Every row once.

    Args:
        whole: `[B]` int64: rows with an equal number stay together and are counted as one: their sample, or their
            group for a loss that compares the samples of a group.
        num_parts: number of mini-batches.
        seed: of the cut.
    """
    generator = torch.Generator().manual_seed(request_seed(*seed))
    numbers, of_row = torch.unique(whole, return_inverse=True)
    order = torch.randperm(len(numbers), generator=generator)
    return [torch.isin(of_row, part).nonzero()[:, 0] for part in order.tensor_split(num_parts)]


def rows_in_turn(num_rows: int, count: int, number: int, *, seed: Sequence[int | str]) -> list[int]:
    """The `number`-th draw of `count` out of `num_rows` rows without replacement; when all rows were drawn, they are
    shuffled again. A pure function: no state is kept between draws."""
    orders: dict[int, list[int]] = {}
    drawn = []
    for at in range(number * count, (number + 1) * count):
        turn, place = divmod(at, num_rows)
        if turn not in orders:
            generator = torch.Generator().manual_seed(request_seed(*seed, turn))
            orders[turn] = torch.randperm(num_rows, generator=generator).tolist()
        drawn.append(orders[turn][place])
    return drawn


def shape_scores(batch: Batch, lengths: LengthConfig, *, max_tokens: int) -> Batch:
    """Adds to `scores` what the lengths of the responses give and cost.

    Args:
        batch: whole groups.
        lengths: `algorithm.lengths`.
        max_tokens: `rollout.max_response_tokens`.
    """
    if lengths.soft_tokens is not None:
        batch = overlong_punishment(
            batch, max_tokens=max_tokens, cache_tokens=lengths.soft_tokens, factor=lengths.soft_factor
        )
    if lengths.penalty:
        batch = length_penalty(batch, coef=lengths.penalty, free_tokens=lengths.free_tokens)
    return relative_length_reward(batch, coef=lengths.shorter_reward) if lengths.shorter_reward else batch


def with_signal(batch: Batch, rows: Tensor) -> Tensor:
    """Those of `rows` `[M]` whose sample has a nonzero advantage on some token; the first row if none has one.

    At least one row is kept, so that the optimizer step still happens: with a zero gradient its moments decay as usual.
    """
    kept = rows[has_advantage(Samples.of(batch))[rows]]
    return kept if len(kept) else rows[:1]


def has_advantage(samples: Samples) -> Tensor:
    """`[B]` bool: rows whose sample has a nonzero advantage on some token."""
    return (samples.token_sum(samples.batch["advantages"].abs()) > 0)[samples.index]


def scatter_loss_weights(batch: Batch, parts: Sequence[Tensor], weights: Sequence[Tensor]) -> Batch:
    """Adds `loss_weight`: scatters each part's weights to the positions of its rows in the whole batch."""
    flat = torch.zeros(batch.num_tokens)
    for rows, weight in zip(parts, weights, strict=True):
        flat[batch.token_index(rows)] = weight
    return batch.with_tokens(loss_weight=flat)
