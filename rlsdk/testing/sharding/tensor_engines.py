"""Engines that hold real tensors but compute nothing, to test weight transfer.

They are built from full tensors and boxes, so they can have the layout of any engine.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rlsdk.interfaces import (
    FINGERPRINT_MODULUS,
    Batch,
    Box,
    CheckpointError,
    ForwardBackwardResult,
    GenerationOutput,
    GenerationRequest,
    Objective,
    OptimStepResult,
    Parallel,
    RankContext,
    RolloutEngine,
    RolloutSpec,
    SyncReceipt,
    TensorMeta,
    TrainEngine,
    TrainSpec,
    UnsupportedCapabilityError,
    WeightLayout,
    WeightShard,
    WeightSyncError,
    fingerprint,
)

Boxes = Sequence[tuple[str, Box]]


def whole_boxes(shapes: Mapping[str, tuple[int, ...]]) -> Boxes:
    """One box per tensor, which covers it."""
    return tuple((name, Box.whole(shape)) for name, shape in shapes.items())


def tensor_layout(
    metas: Sequence[TensorMeta],
    boxes: Boxes,
    *,
    rank: int = 0,
    node: str = "localhost",
    device: str = "cpu",
    process: str | None = None,
    tied: Mapping[str, str] | None = None,
) -> WeightLayout:
    """A layout of this process (or of the named one) that lists the tensors of its boxes."""
    held = {name for name, _ in boxes}
    return WeightLayout(
        rank=rank,
        node=node,
        device=device,
        process=process or f"{node}:{os.getpid()}",
        tensors=tuple(meta for meta in metas if meta.name in held),
        boxes=tuple(boxes),
        tied=dict(tied or {}),
    )


class TensorTrainEngine(TrainEngine):
    """Holds boxes of given tensors; every optimizer step adds `lr` (default 0.125) to each element."""

    def __init__(self, tensors: Mapping[str, Tensor], layout: WeightLayout, *, lr: float = 0.125) -> None:
        self._layout = layout
        self._lr = lr
        self.held = [
            (name, box, tensors[name][box.slices(Box.whole(tensors[name].shape))].clone()) for name, box in layout.boxes
        ]

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        """Does nothing: the constructor got the weights."""

    @property
    def parallel(self) -> Parallel:
        return Parallel()

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        raise UnsupportedCapabilityError(f"{type(self).__name__} holds weights and computes nothing")

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        return ForwardBackwardResult(loss=0.0)

    def optim_step(self) -> OptimStepResult:
        for _, _, tensor in self.held:
            tensor.add_(self._lr)
        return OptimStepResult(grad_norm=0.0, lr=self._lr)

    def layout(self) -> WeightLayout:
        return self._layout

    def shards(self) -> Iterator[WeightShard]:
        for name, box, tensor in self.held:
            yield WeightShard(name=name, box=box, tensor=tensor)

    def save_checkpoint(self, path: Path) -> None:
        raise CheckpointError(f"{type(self).__name__} keeps no checkpoint")

    def load_checkpoint(self, path: Path) -> None:
        raise CheckpointError(f"{type(self).__name__} keeps no checkpoint")


class TensorRolloutEngine(RolloutEngine):
    """Serves boxes of tensors, which are zero until the first update; one layout per rank, all in this object's
    memory."""

    def __init__(self, layouts: Sequence[WeightLayout]) -> None:
        self._layouts = tuple(layouts)
        self.version: int | None = None
        self.served = self._empty()

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        """Does nothing: the constructor got the layouts."""

    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GenerationOutput]:
        raise UnsupportedCapabilityError(f"{type(self).__name__} holds weights and computes nothing")

    def layout(self) -> Sequence[WeightLayout]:
        return self._layouts

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        start = time.perf_counter()
        fresh, covered, num_bytes = self._empty(), 0, 0
        for shard in shards:
            for name, box, tensor in fresh:
                common = box.intersect(shard.box) if name == shard.name else None
                if common is not None:
                    tensor[common.slices(box)] = shard.tensor[common.slices(shard.box)]
                    covered += common.numel
                    num_bytes += common.numel * tensor.element_size()
        wanted = sum(box.numel for _, box, _ in fresh)
        if covered < wanted:
            raise WeightSyncError(f"version {version}: {covered} of {wanted} elements came")
        self.served, self.version = fresh, version
        return SyncReceipt(
            version=version,
            num_tensors=len({name for name, _, _ in fresh}),
            num_bytes=num_bytes,
            fingerprints=self.fingerprints(),
            seconds=time.perf_counter() - start,
        )

    def fingerprints(self) -> dict[str, int]:
        """Fingerprints of the served weights, each distinct box once."""
        totals = {name: 0 for name, _, _ in self.served}
        distinct = {(name, box): tensor for name, box, tensor in self.served}
        for (name, box), tensor in distinct.items():
            totals[name] = (totals[name] + fingerprint(tensor, box)) % FINGERPRINT_MODULUS
        return totals

    def _empty(self) -> list[tuple[str, Box, Tensor]]:
        held = []
        for layout in self._layouts:
            dtypes = {meta.name: getattr(torch, meta.dtype) for meta in layout.tensors}
            held += [(name, box, torch.zeros(box.size, dtype=dtypes[name])) for name, box in layout.boxes]
        return held
