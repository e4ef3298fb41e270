"""Sums of a plan by target and source: what loads, relays, transports and predictions are computed from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlsdk.sharding.plan.box_table import Ints
from rlsdk.sharding.plan.holders import SAME_PROCESS, Places


@dataclass(frozen=True)
class Routes:
    """Each target with each source that sends it something, ordered by target, then by source."""

    target: Ints
    source: Ints
    num_bytes: Ints
    distance: Ints

    @classmethod
    def of(cls, target: Ints, source: Ints, num_bytes: Ints, places: tuple[Places, Places]) -> Routes:
        """Adds up what has the same target and source."""
        givers, takers = places
        num_sources = max(len(givers.node), 1)
        key, which = np.unique(target * num_sources + source, return_inverse=True)
        sums = np.bincount(which.reshape(-1), num_bytes, minlength=len(key)).astype(np.int64)
        target, source = key // num_sources, key % num_sources
        return cls(target, source, sums, givers.distance(source, takers, target))

    def moved_by_source(self, num_sources: int) -> Ints:
        """`[num_sources]`: bytes that each source sends to other processes."""
        away = self.distance != SAME_PROCESS
        sent = np.bincount(self.source[away], self.num_bytes[away], minlength=num_sources)
        return sent.astype(np.int64)
