"""Cutting rows over ranks. Pure functions of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlsdk.kit.balance import balanced_partition

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def split_rows(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Row numbers of each part: balanced by tokens, every row exactly once, ascending within a part.

    Args:
        lengths: tokens in each row.
        parts: number of data-parallel ranks. With fewer rows than parts some parts are empty.
    """
    return balanced_partition(lengths, parts)


def as_run(rows: NDArray[np.int64]) -> tuple[int, int] | None:
    """`(start, stop)` when the numbers are consecutive and ascending (an empty list is `(0, 0)`), else None."""
    if len(rows) == 0:
        return 0, 0
    start, stop = int(rows[0]), int(rows[-1]) + 1
    consecutive = stop - start == len(rows) and bool((rows[1:] - rows[:-1] == 1).all())
    return (start, stop) if consecutive else None
