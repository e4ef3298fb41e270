"""Splits a rank's rows into micro-batches that fit into memory."""

from __future__ import annotations

import torch
from torch import Tensor

from rlsdk.interfaces import Batch, ConfigError, Objective
from rlsdk.interfaces.settings import PassLimits


def micro_batches(
    lengths: Tensor,
    *,
    max_tokens: int | None = None,
    max_rows: int | None = None,
    min_count: int = 1,
    groups: Tensor | None = None,
    near: Tensor | None = None,
) -> list[Tensor]:
    """Splits rows into forward and backward passes; every row is in one pass, with rows of similar length.

    Args:
        lengths: `[B]` int64 tokens of each row.
        max_tokens: most tokens in one pass; a longer row is a pass of its own. Exactly one of this and `max_rows`.
        max_rows: most rows in one pass.
        min_count: smallest number of passes (some may be empty), so that all ranks make the same number.
        groups: `[B]` int64; rows with equal numbers stay in one pass, and a group over the limit is a pass of its own.
            For objectives that compare rows (`whole_groups`).
        near: `[B]` int64; if there are several passes, rows with equal numbers are neighbours, so that most of their
            common prefix is computed once (`rlsdk.kit.model.prefixes`).

    Returns:
        Row indices of each pass, int64, on the CPU. A single pass with all rows keeps their order.

    Raises:
        ConfigError: not exactly one limit, or one below 1.
    """
    limit = max_tokens if max_rows is None else max_rows
    if (max_tokens is None) == (max_rows is None) or limit is None or limit < 1:
        raise ConfigError(
            f"micro_batch_tokens is {max_tokens} and micro_batch_rows is {max_rows}; expected one of them, at least 1"
        )
    lengths = lengths.cpu()
    if groups is not None:
        return _of_whole_groups(
            lengths if max_rows is None else torch.ones_like(lengths), limit, min_count, groups.cpu()
        )
    order = torch.argsort(lengths, stable=True) if near is None else _neighbours(lengths, near.cpu())
    cost = lengths[order] if max_rows is None else torch.ones_like(order)
    if min_count <= 1 and int(cost.sum()) <= limit:
        return [torch.arange(len(order))]
    cut = _cut_by_cost(cost.tolist(), limit)
    while len(cut) < min_count and max(stop - start for start, stop in cut) > 1:
        _halve_longest(cut)
    passes = [order[start:stop] for start, stop in cut]
    return passes + [order[:0]] * (min_count - len(passes))


def cut_passes(
    spec: PassLimits,
    lengths: Tensor,
    *,
    min_count: int = 1,
    groups: Tensor | None = None,
    near: Tensor | None = None,
) -> list[Tensor]:
    """`micro_batches` within the limits of a specification."""
    limits = {"max_tokens": spec.micro_batch_tokens, "max_rows": spec.micro_batch_rows}
    return micro_batches(lengths, min_count=min_count, groups=groups, near=near, **limits)


def check_limits(spec: PassLimits) -> None:
    """Raises `ConfigError` where not exactly one limit is set, or one is below 1."""
    cut_passes(spec, torch.ones(1, dtype=torch.int64))


def rows_that_belong_together(batch: Batch) -> Tensor | None:
    """The argument `near` of `micro_batches`: by `uid` if the batch has it."""
    return batch.rows.get("uid")


def groups_to_keep(batch: Batch, objective: Objective | None) -> Tensor | None:
    """The argument `groups` of `micro_batches`: by `uid` if the objective needs whole groups, by sample if it is enough
    to keep those whole; None for a forward pass."""
    if not getattr(objective, "whole_groups", False):
        return None
    return batch.sample_of_row if getattr(objective, "whole_samples", False) else batch["uid"]


def _of_whole_groups(cost: Tensor, limit: int, min_count: int, groups: Tensor) -> list[Tensor]:
    """Passes over groups, each treated as one row; then replaced by its rows, in their order."""
    numbers, index = torch.unique(groups, return_inverse=True)
    totals = cost.new_zeros(len(numbers)).index_add(0, index, cost)
    passes = micro_batches(totals, max_tokens=limit, min_count=min_count)
    return [torch.isin(index, members).nonzero()[:, 0] for members in passes]


def _neighbours(lengths: Tensor, near: Tensor) -> Tensor:
    """`[B]` int64: order of rows by the longest row with the same `near`, then by `near`, then by length."""
    _, index = torch.unique(near, return_inverse=True)
    longest = lengths.new_zeros(len(near)).scatter_reduce(0, index, lengths, "amax")[index]
    order = torch.argsort(lengths, stable=True)
    for key in (index, longest):
        order = order[torch.argsort(key[order], stable=True)]
    return order


def _cut_by_cost(cost: list[int], limit: int) -> list[tuple[int, int]]:
    """Ranges of neighbours whose total cost is within the limit; a row above the limit is a range of its own."""
    cut, start, room = [], 0, limit
    for at, needed in enumerate(cost):
        if needed > room and at > start:
            cut.append((start, at))
            start, room = at, limit
        room -= needed
    return [*cut, (start, len(cost))]


def _halve_longest(cut: list[tuple[int, int]]) -> None:
    """Splits the range with the most rows in two."""
    at = max(range(len(cut)), key=lambda i: cut[i][1] - cut[i][0])
    start, stop = cut[at]
    cut[at : at + 1] = [(start, (start + stop) // 2), ((start + stop) // 2, stop)]
