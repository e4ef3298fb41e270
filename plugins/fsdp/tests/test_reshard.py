"""Ranks that split rows hold the shards that they hold without: targets get each byte once.

`test_forecast.py` shows that ranks come to hold the layouts that are forecast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rlsdk.interfaces import Box, ModelSpec, OptimSpec, RankContext, TrainSpec, WeightLayout, Workload
from rlsdk.sharding import TRANSPORTS, plan_reshard
from rlsdk.testing.process.models import write_tiny_model
from rlsdk_fsdp.config import FsdpOptions
from rlsdk_fsdp.forecast import forecast

WORK = Workload(row_tokens=16, update_rows=8, running_rows=1)


def ranks(model: Path, world: int, context_parallel: int) -> list[WeightLayout]:
    spec = TrainSpec(
        model=ModelSpec(path=str(model)),
        optim=OptimSpec(lr=1e-3),
        micro_batch_rows=1,
        options=FsdpOptions(context_parallel=context_parallel),
    )
    contexts = [RankContext(role="actor", rank=rank, world_size=world, local_rank=rank) for rank in range(world)]
    found = forecast(contexts, spec, WORK)
    assert found.dp_size == world // context_parallel
    return [replace(layout, process=f"rank {at}") for at, (layout,) in enumerate(found.layouts)]


def tensor_parallel(source: Sequence[WeightLayout], size: int, process: str) -> list[WeightLayout]:
    """Workers that have equal parts of every matrix: rows, or columns where they end an attention or feed-forward."""
    tensors = {meta.name: meta for layout in source for meta in layout.tensors}
    workers = []
    for worker in range(size):
        boxes = []
        for name, meta in tensors.items():
            box = Box.whole(meta.shape)
            if len(meta.shape) == 2:
                at = int(name.endswith(("o_proj.weight", "down_proj.weight")))
                share = meta.shape[at] // size
                offset, length = list(box.offset), list(box.size)
                offset[at], length[at] = worker * share, share
                box = Box(tuple(offset), tuple(length))
            boxes.append((name, box))
        workers.append(
            replace(
                source[0],
                rank=worker,
                process=process.format(worker),
                tensors=tuple(tensors.values()),
                boxes=tuple(boxes),
            )
        )
    return workers


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_are_at_the_lower_bound(world: int, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    source = ranks(model, world, 2)
    assert source == ranks(model, world, 1)
    tensors = {meta.name: meta.shape for layout in source for meta in layout.tensors}
    for size in (1, 2):
        for process in ("engine {}", "rank {}"):
            target = tensor_parallel(source, size, process)
            made = plan_reshard(source, target, bucket_bytes=4096, transports=TRANSPORTS)
            lacking = 0
            for worker in target:
                home = {
                    name: box for layout in source if layout.process == worker.process for name, box in layout.boxes
                }
                for name, box in worker.boxes:
                    shared = box.intersect(home[name]) if name in home else None
                    lacking += 4 * (box.numel - (0 if shared is None else shared.numel))
            assert made.moved_bytes == made.lower_bound_bytes == lacking
            received: dict[str, int] = dict.fromkeys(tensors, 0)
            for bucket in made.buckets:
                for transfer in bucket.transfers:
                    received[transfer.name] += transfer.box.numel
            wanted = [(name, box.numel) for worker in target for name, box in worker.boxes]
            assert received == {name: sum(count for key, count in wanted if key == name) for name in tensors}
