"""Updates that the workers of one engine receive directly: three ranks with a part of every tensor's rows, as in FSDP,
and checks of what each worker received."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import (
    Box,
    Bucket,
    GenerationRequest,
    RolloutEngine,
    SamplingParams,
    SyncReport,
    TensorMeta,
    WeightLayout,
)
from rlsdk.sharding import GenericShardingManager
from rlsdk.sharding.plan.boxes import covered_elements
from rlsdk.testing.rollout.lab import collect, whole_shards
from rlsdk.testing.rollout.plain_model import PlainModel
from rlsdk.testing.sharding.local_groups import LocalGroup, LocalPeer, RolloutHost, TrainHost
from rlsdk.testing.sharding.tensor_engines import TensorTrainEngine, tensor_layout

SOURCES = 3
BUCKET_BYTES = 100_000
"""Bucket size: small, so that an update of a small model has several rounds."""


class CountedHost(TrainHost):
    """Counts calls of its methods."""

    calls = 0
    buckets = 0

    def export_weights(self, buckets: Sequence[Bucket], sync: str = "") -> Sequence[Mapping[str, Any]]:
        self.calls += 1
        self.buckets += len(buckets)
        return super().export_weights(buckets, sync)


class FarGroup(LocalGroup):
    """Ranks as if in their own processes."""

    def peers(self) -> Sequence[LocalPeer]:
        return [LocalPeer(host, is_local=False) for host in self.hosts]


def row_ranks(
    state: Mapping[str, Tensor], host: type[CountedHost] = CountedHost, *, node: str | None = None
) -> FarGroup:
    """Ranks that each hold a third of each tensor's rows, on `node`, by default the node of these tests' layouts."""
    metas = [TensorMeta(name=name, shape=tuple(t.shape), dtype="float32") for name, t in state.items()]
    hosts = []
    for rank in range(SOURCES):
        boxes = []
        for meta in metas:
            rows = meta.shape[0]
            low, high = rows * rank // SOURCES, rows * (rank + 1) // SOURCES
            boxes.append((meta.name, Box((low, *(0,) * (len(meta.shape) - 1)), (high - low, *meta.shape[1:]))))
        layout = tensor_layout(metas, boxes, rank=rank, process=f"train:{rank}")
        layout = layout if node is None else replace(layout, node=node)
        hosts.append(host(TensorTrainEngine(state, layout)))
    return FarGroup(hosts)


def bytes_held(layout: WeightLayout) -> int:
    """Bytes of a layout's boxes in float32."""
    return sum(4 * box.numel for _, box in layout.boxes)


def largest_difference(
    plain: PlainModel, state: Mapping[str, Tensor], engine: RolloutEngine, prompt: tuple[int, ...] = (5, 6, 9, 30, 7)
) -> float:
    """Largest difference of the log-probs of some samples from those of the given weights."""
    request = GenerationRequest(request_id="x", prompt_ids=prompt, n=3, sampling=SamplingParams(max_tokens=12))
    right, worst = plain.with_state(state), 0.0
    for output in asyncio.run(collect(engine, [request])):
        ids = torch.tensor([[*prompt, *output.token_ids.tolist()]])
        with torch.no_grad():
            found = right.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        wanted = found.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        worst = max(worst, float((wanted - torch.from_numpy(output.log_probs)).abs().max()))
    return worst


def check_foreseen(foreseen: Sequence[WeightLayout], real: Sequence[WeightLayout]) -> None:
    """Checks that the forecast layout of each worker is the one that it reports.

    Args:
        foreseen: layouts of the backend's forecast, one for each worker.
        real: layouts of the engine.
    """
    assert len(foreseen) == len(real) == len({layout.process for layout in foreseen})
    for mine, theirs in zip(foreseen, real, strict=True):
        assert {meta.name: meta for meta in mine.tensors} == {meta.name: meta for meta in theirs.tensors}
        assert mine.tied == theirs.tied
        for meta in theirs.tensors:
            held, wanted = ([box for name, box in layout.boxes if name == meta.name] for layout in (theirs, mine))
            assert sum(covered_elements(box, held) for box in wanted) == sum(box.numel for box in wanted)
            assert sum(box.numel for box in wanted) == covered_elements(Box.whole(meta.shape), held), meta.name


TWO_NODES = (("ring", "process_group"), ("ring", "object_store"))
"""Transports of two updates: to workers on the sources' node; and to others, directly or through their replica's
process."""


def update_two_nodes(
    plain: PlainModel, rollout: LocalGroup, transports: Sequence[str], version: int, node: str
) -> tuple[SyncReport, FarGroup, dict[str, Tensor]]:
    """One update with new weights.

    Args:
        plain: the model.
        rollout: the replica.
        transports: the allowed transports.
        version: version of the new weights, from 1.
        node: node of the sources.

    Returns:
        The report, the sources, and the weights that were sent.
    """
    state = {name: tensor + 0.125 * version for name, tensor in plain.state.items()}
    train = row_ranks(state, node=node)
    manager = GenericShardingManager(train, rollout, bucket_bytes=BUCKET_BYTES, transports=transports)
    return manager.sync(version, expect_change=False), train, state


def check_two_nodes(plain: PlainModel, engine: RolloutEngine, tolerance: float) -> None:
    """Checks updates of a replica whose first worker is on node "near" and whose second is on node "far", by every
    transport; then one of whole tensors, which the engine in the replica's process sends to both.

    Args:
        plain: the model.
        engine: the replica's engine.
        tolerance: tolerance of log-probs.
    """
    layouts = engine.layout()
    assert [(layout.node, layout.is_apart) for layout in layouts] == [("near", False), ("far", True)]
    rollout = LocalGroup([RolloutHost(engine)])
    try:
        for version, ways in enumerate(TWO_NODES, start=1):
            report, _, state = update_two_nodes(plain, rollout, ways, version, "near")
            assert sorted(report.transports) == sorted(ways)
            assert [part.num_bytes for part in report.receipts[0].workers] == list(map(bytes_held, layouts))
            assert largest_difference(plain, state, engine) < tolerance
        engine.update_weights(whole_shards(plain.state), len(TWO_NODES) + 1)
        assert largest_difference(plain, plain.state, engine) < tolerance
    finally:
        rollout.hosts[0].target.close()


def check_workers_take_their_own(
    plain: PlainModel, engine: RolloutEngine, tolerance: float, *, samples: bool = True
) -> None:
    """Checks two updates: each sends every worker the bytes that it holds, in one call for each pair of source and
    worker, and the engine then serves the sent weights.

    Args:
        plain: the model.
        engine: an engine whose workers receive their own parts.
        tolerance: tolerance of log-probs.
        samples: whether the engine can sample; its receipt is checked in any case.
    """
    layouts = engine.layout()
    assert len({layout.worker for layout in layouts}) == len({layout.process for layout in layouts}) == len(layouts)
    held = list(map(bytes_held, layouts))
    train, rollout = row_ranks(plain.state), LocalGroup([RolloutHost(engine)])
    manager = GenericShardingManager(train, rollout, bucket_bytes=BUCKET_BYTES)
    state = {name: tensor.clone() for name, tensor in plain.state.items()}
    try:
        for version in (1, 2):
            report = manager.sync(version)
            (receipt,) = report.receipts
            assert [part.num_bytes for part in receipt.workers] == held
            assert [part.worker for part in receipt.workers] == [layout.worker for layout in layouts]
            assert report.moved_bytes == report.lower_bound_bytes == sum(held)
            assert report.transports == ("ring",)
            # One call for each pair of source and worker, whatever the number of buckets.
            assert [host.calls for host in train.hosts] == [len(layouts) * version] * SOURCES
            assert all(host.buckets > 5 * host.calls for host in train.hosts)
            assert not samples or largest_difference(plain, state, engine) < tolerance
            train.run("optim_step")
            state = {name: tensor + 0.125 for name, tensor in state.items()}
    finally:
        rollout.hosts[0].target.close()
