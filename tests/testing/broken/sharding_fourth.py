"""Sharding managers of the fourth trial."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from rlsdk.sharding import GenericShardingManager
from rlsdk.sharding.verify import changed_tensors


class LastRoundJoined(GenericShardingManager):
    """A small last round joins the one before, over the bound."""

    def plan(self, source, target):
        plan = super().plan(source, target)
        parts = []
        for part in plan.parts:
            last = max((bucket.round for bucket in part), default=0)
            size = sum(bucket.num_bytes for bucket in part if bucket.round == last)
            if last == 0 or size * 4 > plan.bucket_bytes:
                parts.append(tuple(part))
                continue
            joined, tail = list(part), [bucket for bucket in part if bucket.round == last]
            joined = [bucket for bucket in joined if bucket.round != last]
            for bucket in tail:
                at = next((i for i, b in enumerate(joined) if b.round == last - 1 and b.source == bucket.source), None)
                if at is None:
                    joined.append(replace(bucket, round=last - 1))
                else:
                    joined[at] = replace(
                        joined[at],
                        transfers=(*joined[at].transfers, *bucket.transfers),
                        num_bytes=joined[at].num_bytes + bucket.num_bytes,
                    )
            parts.append(tuple(sorted(joined, key=lambda b: (b.round, b.source))))
        return replace(plan, parts=tuple(parts))


class ChangedSinceTheFirst(GenericShardingManager):
    """Changed tensors are counted against the first sync."""

    first = None

    def _check_changed(self, now, version, expect_change):
        super()._check_changed(now, version, expect_change)
        if self.first is None:
            self.first = now
            return len(now)
        return changed_tensors(now, self.first)


class SharedPoolOfTheClass(GenericShardingManager):
    """Managers of as many ranks share what the first of them knows of its groups."""

    _shared: ClassVar[dict] = {}

    def ends(self):
        key = (self.train.backend, self.rollout.backend, len(self.train.peers()), len(self.rollout.peers()))
        if self._ends is None:
            self._ends = self._shared.get(key)
        found = super().ends()
        if not self._shared:
            self._shared[key] = found
        return found
