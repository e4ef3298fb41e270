"""Cutting a rank's rows into passes that fit into memory."""

from __future__ import annotations

import torch
from torch import Tensor


def micro_batches(
    lengths: Tensor, *, max_tokens: int | None = None, max_rows: int | None = None, min_count: int = 1
) -> list[Tensor]:
    """Row indices of each forward and backward pass; every row once, rows of like length together.

    Args:
        lengths: `[B]` int64 tokens of each row.
        max_tokens: most tokens in one pass; a longer row goes alone. Exactly one of this and `max_rows`.
        max_rows: most rows in one pass.
        min_count: at least so many passes (the last may be empty), so that all ranks make the same number.
    """
    if (max_tokens is None) == (max_rows is None):
        raise ValueError(f"give one of max_tokens ({max_tokens}) and max_rows ({max_rows})")
    order = torch.argsort(lengths, stable=True)
    if max_rows is not None:
        cut = [order[start : start + max_rows] for start in range(0, len(order), max_rows)]
    else:
        cut = _by_tokens(order, lengths, max_tokens or 1)
    while len(cut) < min(min_count, len(order)):
        largest = max((at for at, part in enumerate(cut) if len(part) > 1), key=lambda at: int(lengths[cut[at]].sum()))
        part = cut[largest]
        cut[largest : largest + 1] = [part[: len(part) // 2], part[len(part) // 2 :]]
    return cut + [order[:0]] * (min_count - len(cut))


def _by_tokens(order: Tensor, lengths: Tensor, max_tokens: int) -> list[Tensor]:
    cut: list[list[int]] = []
    room = 0
    for row, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if not cut or length > room:
            cut.append([])
            room = max_tokens
        cut[-1].append(row)
        room -= length
    return [torch.tensor(part) for part in cut]
