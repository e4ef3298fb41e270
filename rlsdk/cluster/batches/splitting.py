"""Splits rows over ranks. Pure functions of numbers."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlsdk.cluster.batches.balance import balanced_partition

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_DIFFERENCING_LIMIT = 4096
"""Rows times parts up to which largest differencing is used: a millisecond's work."""
_UNEVEN = 0.1
"""By how much groups that stay together may make the heaviest part heavier."""


def split_rows(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Row numbers of each part: balanced by tokens, every row exactly once, ascending within a part.

    Karmarkar-Karp for few rows. Its time grows with rows times parts (40 ms for 1024 rows on 64 ranks); with that many
    rows to choose from, longest-first is within a thousandth of it and takes no time.

    Args:
        lengths: tokens in each row.
        parts: number of data-parallel ranks. With fewer rows than parts some parts are empty.
    """
    if len(lengths) * parts <= _DIFFERENCING_LIMIT:
        return balanced_partition(lengths, parts)
    return longest_first(lengths, parts)


def split_groups(lengths: Sequence[int], groups: Sequence[int], parts: int) -> list[list[int]]:
    """As `split_rows`, but rows of one group go to the same part; `groups` holds each row's group."""
    rows: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    members = list(rows.values())
    cut = split_rows([sum(lengths[row] for row in group) for group in members], parts)
    return [sorted(row for group in part for row in members[group]) for part in cut]


def split_near(lengths: Sequence[int], groups: Sequence[int], parts: int) -> list[list[int]]:
    """As `split_groups` where that makes no part much heavier, else as `split_rows`: what rows of one group have in
    common is computed once where they are together (`rlsdk.kit.model.prefixes`)."""
    rows, whole = split_rows(lengths, parts), split_groups(lengths, groups, parts)
    return whole if _heaviest(lengths, whole) <= (1 + _UNEVEN) * _heaviest(lengths, rows) else rows


def _heaviest(lengths: Sequence[int], cut: Sequence[Sequence[int]]) -> int:
    return max(sum(lengths[row] for row in part) for part in cut)


def longest_first(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Each row, longest first, to the part that has least (Graham, 1969): at most 4/3 of the best split."""
    least = [(0, part) for part in range(parts)]
    rows: list[list[int]] = [[] for _ in range(parts)]
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        load, part = least[0]
        rows[part].append(row)
        heapq.heapreplace(least, (load + lengths[row], part))
    return [sorted(part) for part in rows]


def as_run(rows: NDArray[np.int64]) -> tuple[int, int] | None:
    """`(start, stop)` when the numbers are consecutive and ascending (an empty list is `(0, 0)`), else None."""
    if len(rows) == 0:
        return 0, 0
    start, stop = int(rows[0]), int(rows[-1]) + 1
    consecutive = stop - start == len(rows) and bool((rows[1:] - rows[:-1] == 1).all())
    return (start, stop) if consecutive else None
