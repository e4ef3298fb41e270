"""How often a sync calls its sources: of the order of pairs of processes, and not of buckets."""

from __future__ import annotations

from collections import deque

import pytest
from sharding_cases import metas_of, whole_target

from rlsdk.interfaces import Box, WeightLayout
from rlsdk.sharding.plan.planner import plan_reshard
from rlsdk.sharding.transfer.fetching import window
from rlsdk.sharding.transports.table import named_transports
from rlsdk.testing.sharding.tensor_engines import tensor_layout

LAYERS = 12
SHAPES = {
    "embed": (32768, 2048),
    **{
        f"layer.{at}.{name}": shape
        for at in range(LAYERS)
        for name, shape in {"attention": (6144, 2048), "up": (8192, 2048)}.items()
    },
}
GIGABYTES = 2 * sum(rows * columns for rows, columns in SHAPES.values()) / 1e9


def fsdp(ranks: int) -> list[WeightLayout]:
    metas = metas_of(SHAPES, "bfloat16")
    return [
        tensor_layout(
            metas,
            [(n, Box((rank * rows // ranks, 0), (rows // ranks, columns))) for n, (rows, columns) in SHAPES.items()],
            rank=rank,
            process=f"train:{rank}",
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("transport", ["process_group", "object_store"])
def test_a_thousand_ranks_of_fsdp_are_called_once_each_for_a_whole_replica(transport: str) -> None:
    """Streams, and what is small enough for one answer."""
    (kind,) = named_transports([transport])

    class Anywhere(kind):  # type: ignore[misc,valid-type]
        @classmethod
        def reaches(cls, source: object, target: object) -> bool:
            return True

    plan = plan_reshard(
        fsdp(1024), [whole_target(SHAPES, dtype="bfloat16")], bucket_bytes=64 << 20, transports=[Anywhere]
    )
    by_source: dict[int, deque[object]] = {}
    for bucket in plan.parts[0]:
        by_source.setdefault(bucket.source, deque()).append(bucket)
    assert len(by_source) == 1024
    assert len(plan.parts[0]) / GIGABYTES > 3000
    calls = 0
    for left in by_source.values():
        while left:
            for _ in window(left, kind.call_bytes):  # type: ignore[arg-type]
                left.popleft()
            calls += 1
    assert calls == 1024
