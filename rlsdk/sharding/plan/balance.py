"""Chooses the source of each box that several hold: spreads the work evenly by arithmetic, without search."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlsdk.sharding.plan.box_table import BoxTable, Ints, first_axis, ragged
from rlsdk.sharding.plan.holders import RankSets

SWEEPS = 6
"""Largest number of sweeps of coordinate descent; in practice sets of replicas are nested, and the first sweep is
exact."""
SETTLED = 1e-3
"""A sweep that lowers the largest load by less than this share is the last."""
TURN_BYTES = 4 << 20
"""Bytes that each replica sends per turn if replicas take turns, so that all of them work concurrently."""
MAX_TURNS = 1 << 18
"""Total number of turns: bounds the pieces that taking turns adds to a large plan."""


def quotas(num_bytes: Ints, sets: RankSets, num_ranks: int) -> NDArray[np.float64]:
    """Splits the bytes of each set among its members so that the largest load is minimal.

    Coordinate descent on the sum of squared loads, with exact water-filling for each set. The problem is convex and its
    constraints separate over sets, so it converges to the most even loads.

    Args:
        num_bytes: `[sets]`: bytes of each set.
        sets: sets of ranks that may share these bytes, none empty.
        num_ranks: total number of ranks.

    Returns:
        `[members of all sets]`: the bytes of each member, in the order of `sets`.
    """
    counts = sets.counts
    given = np.where(np.repeat(counts, counts) == 1, np.repeat(num_bytes, counts), 0).astype(np.float64)
    load = np.bincount(sets.members, given, minlength=num_ranks)
    shared = [int(at) for at in np.argsort(counts, kind="stable") if counts[at] > 1 and num_bytes[at]]
    before = math.inf
    for _ in range(SWEEPS):
        for at in shared:
            span = slice(sets.start[at], sets.start[at + 1])
            members = sets.members[span]
            others = load[members] - given[span]
            given[span] = _fill_up(others, float(num_bytes[at]))
            load[members] = others + given[span]
        highest = float(load.max(initial=0))
        if not shared or highest > before * (1 - SETTLED):
            break
        before = highest
    return given


def _fill_up(loads: NDArray[np.float64], amount: float) -> NDArray[np.float64]:
    """Water-filling: the part of `amount` that each load gets if the lowest loads rise together."""
    ordered = np.sort(loads)
    levels = (amount + np.cumsum(ordered)) / np.arange(1, len(ordered) + 1)
    reached = int(np.flatnonzero(levels >= ordered)[-1])
    filled: NDArray[np.float64] = np.maximum(levels[reached] - loads, 0.0)
    return filled


@dataclass(frozen=True)
class Turns:
    """Which of several sources sends what.

    All boxes of a set of sources are concatenated on a line, by target. The line is split into equal cycles, and in
    each cycle every member sends its share, so that the load is even in every part of the plan and not only in total.
    The number of cycles is coprime to the number of targets, so that targets start with different members. The lines of
    all sets follow one another.
    """

    bounds: Ints
    """`[turns + 1]`: bounds of the turns on the line, in bytes."""
    owner: Ints
    """`[turns]`: the source of each turn."""

    @classmethod
    def of(cls, totals: Ints, num_targets: Ints, sets: RankSets, num_ranks: int, *, shift: int = 0) -> Turns:
        """Divides the lines into turns.

        Args:
            totals: `[sets]`: bytes of each line.
            num_targets: `[sets]`: number of targets that receive something from each set.
            sets: sets of source ranks.
            num_ranks: number of source ranks.
            shift: each source takes the turn of the source `shift` places before it in its set.
        """
        return cls(*_turns(totals, quotas(totals, sets, num_ranks), sets, num_targets, shift))

    def cut(self, boxes: BoxTable, num_bytes: Ints, begin: Ints) -> tuple[BoxTable, Ints, Ints]:
        """Assigns a source to every box; a box is split between rows where the turn of one source ends.

        Args:
            boxes: `[N]`
            num_bytes: `[N]`
            begin: `[N]`: where each box begins on the line.

        Returns:
            Pieces in the same order, the row of `boxes` that each belongs to, and the source of each.
        """
        first = np.searchsorted(self.bounds, begin, side="right") - 1
        count = np.searchsorted(self.bounds, begin + num_bytes, side="left") - first
        at, turn = np.repeat(np.arange(len(boxes)), count), np.repeat(first, count) + ragged(count)
        axis, row = first_axis(boxes)
        rows = boxes.size[np.arange(len(boxes)), axis]
        axis, row_bytes, rows, begin = (values[at] for values in (axis, num_bytes // boxes.numel * row, rows, begin))
        low, high = (
            np.clip((self.bounds[edge] - begin + row_bytes // 2) // row_bytes, 0, rows) for edge in (turn, turn + 1)
        )
        kept = np.flatnonzero(high > low)
        pieces = boxes.take(at[kept])
        where = (np.arange(len(kept)), axis[kept])
        pieces.offset[where] += low[kept]
        pieces.size[where] = (high - low)[kept]
        return pieces, at[kept], self.owner[turn[kept]]


def _turns(
    totals: Ints, given: NDArray[np.float64], sets: RankSets, num_targets: Ints, shift: int
) -> tuple[Ints, Ints]:
    """`[turns + 1]`: bounds of the turns on the line, in bytes; and `[turns]`: the source of each turn."""
    counts = sets.counts
    most = max(1, MAX_TURNS // max(1, int(counts.sum())))
    cycles = np.clip(totals // (counts * TURN_BYTES), 1, most)
    cycles[counts == 1] = 1
    for at in np.flatnonzero(counts > 1):
        while math.gcd(int(cycles[at]), int(num_targets[at])) > 1:
            cycles[at] += 1
    running = np.cumsum(given)
    share_end = running - np.repeat(running[sets.start[1:] - 1] - np.add.reduceat(given, sets.start[:-1]), counts)
    line = np.cumsum(totals) - totals
    turns = counts * cycles
    of_set, number = np.repeat(np.arange(len(sets)), turns), ragged(turns)
    cycle, member = number // counts[of_set], number % counts[of_set]
    place = sets.start[of_set] + member
    whole, part = totals[of_set] / cycles[of_set], share_end[place] / cycles[of_set]
    last = member == counts[of_set] - 1
    ends = np.rint(np.where(last, (cycle + 1) * whole, cycle * whole + part)).astype(np.int64)
    return np.concatenate(([0], line[of_set] + ends)), sets.members[
        sets.start[of_set] + (member + shift) % counts[of_set]
    ]
