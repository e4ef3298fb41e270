"""Requirement: weights that replicas serve as float8 with one scale per block."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import (
    BlockScales,
    Box,
    LayoutError,
    RlsdkError,
    ShardingManager,
    SyncReceipt,
    TensorMeta,
    WeightLayout,
    WeightShard,
    WeightSyncError,
    fingerprint,
)
from rlsdk.testing.sharding.lab import ShardingLab
from rlsdk.testing.sharding.local_groups import LocalGroup, RolloutHost, TrainHost
from rlsdk.testing.sharding.tensor_engines import TensorRolloutEngine, TensorTrainEngine, tensor_layout, whole_boxes
from rlsdk.testing.suites.requirements import Measured, requirement

SHAPES: Mapping[str, tuple[int, ...]] = {"up": (22, 13), "down": (16, 24), "norm": (13,)}
BLOCK = 4
RANKS = 3
LEAST, LARGEST = 1e-4, 448.0
LIES = ("a value", "a scale", "no scales in the receipt")
"""Faults of a replica in its quantized weights."""


class QuantizedRequirements:
    """Mixed into `ShardingConformance`."""

    @requirement("sync.quantized", since=(2, 0))
    def test_quantized(self, lab: ShardingLab, measured: Measured) -> None:
        """Weights that replicas serve as float8 with block scales (`TensorMeta.scales`) are sent unquantized, in the
        dtype that is quantized or the source's narrower one, however sources split blocks; the report counts each such
        tensor once; weights whose scales alone changed count as changed; a replica that quantizes differently, or omits
        its scales from the receipt, is a WeightSyncError. A manager without this feature refuses such layouts with a
        LayoutError."""
        wrong, accepted = [], []
        for held in ("float32", "bfloat16"):
            manager, engines = _groups(lab, held)
            try:
                count = manager.sync(1).quantized_tensors
            except LayoutError:
                return  # The manager refused, and nothing was sent.
            num_quantized = sum(len(shape) == 2 for shape in SHAPES.values())
            wrong += [] if count == num_quantized else [f"{count} quantized tensors reported, not {num_quantized}"]
            wrong += [fault for engine in engines for fault in engine.faults(held)]
            # Blocks of weights that are all doubled have the same float8 values and other scales.
            for host in manager.train.hosts:  # type: ignore[attr-defined]
                for _, _, tensor in host.engine.held:
                    tensor.mul_(2)
            try:
                changed = manager.sync(2, expect_change=True).changed_tensors
                wrong += [] if changed == len(SHAPES) else [f"{changed} tensors changed, all were doubled ({held})"]
            except WeightSyncError as error:
                wrong.append(f"doubled weights ({held}): {error}")
            for lie in LIES:
                for host in manager.train.hosts:  # type: ignore[attr-defined]
                    host.optim_step()
                engines[-1].lie = lie
                try:
                    manager.sync(3)
                except WeightSyncError:
                    continue
                except RlsdkError as error:
                    wrong.append(f"{lie}: {type(error).__name__} and no WeightSyncError")
                else:
                    accepted.append(f"{lie} ({held} sources)")
        measured.none("served otherwise", wrong)
        measured.none("accepted", accepted)


class QuantizingEngine(TensorRolloutEngine):
    """Quantizes tensors once they have arrived completely."""

    lie: str | None = None

    def __init__(self, layout: WeightLayout) -> None:
        super().__init__([layout])
        self.came: dict[str, tuple[torch.dtype, Tensor]] = {}
        """By tensor: the dtype in which it was sent, and the values."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        (layout,) = self._layouts
        metas = {meta.name: meta for meta in layout.tensors}
        self.came = {}
        for shard in shards:
            shape = metas[shard.name].shape
            blank = torch.full(shape, math.nan)  # missing values stay visible
            _, whole = self.came.setdefault(shard.name, (shard.tensor.dtype, blank))
            whole[shard.box.slices(Box.whole(shape))] = shard.tensor.float()
        served: dict[str, Tensor] = {}
        for name, (_, values) in self.came.items():
            scales = metas[name].scales
            if scales is None:
                served[name] = values.to(getattr(torch, metas[name].dtype))
            else:
                served[name], served[scales.name] = quantized(values.to(torch.bfloat16).float())
        self._apply_lie(served)
        prints = {name: fingerprint(tensor, Box.whole(tuple(tensor.shape))) for name, tensor in served.items()}
        return SyncReceipt(version=version, num_tensors=len(metas), num_bytes=0, fingerprints=prints)

    def faults(self, held: str) -> list[str]:
        """Received values that differ from those that sources with weights in dtype `held` must send."""
        found = []
        for name, values in weights(held).items():
            dtype, came = self.came.get(name, (None, torch.empty(0)))
            narrowest = torch.bfloat16 if len(SHAPES[name]) == 2 or held == "bfloat16" else torch.float32
            if dtype != narrowest:
                found.append(f"{name} came in {dtype}, not {narrowest}")
            elif not torch.equal(came, values.to(narrowest).float()):
                found.append(f"{name} did not come whole")
        return found

    def _apply_lie(self, served: dict[str, Tensor]) -> None:
        if self.lie == LIES[0]:
            served["up"].view(torch.uint8)[-1, -1] ^= 1
        elif self.lie == LIES[1]:
            served["up_scale"].view(torch.int32)[-1, -1] ^= 1
        elif self.lie == LIES[2]:
            del served["down_scale"]


def quantized(values: Tensor) -> tuple[Tensor, Tensor]:
    """(float8_e4m3fn values, float32 scales) of a matrix. A block's scale is its largest magnitude, at least 1e-4,
    divided by 448."""
    rows, columns = (-(-length // BLOCK) * BLOCK for length in values.shape)
    padded = torch.zeros(rows, columns)
    padded[: values.shape[0], : values.shape[1]] = values
    grid = padded.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = grid.abs().amax((1, 3)).clamp(min=LEAST) / LARGEST
    found = (grid * (1.0 / scales)[:, None, :, None]).reshape(rows, columns)
    return found[: values.shape[0], : values.shape[1]].to(torch.float8_e4m3fn), scales


def weights(held: str) -> dict[str, Tensor]:
    """Weights of the sources, in their dtype."""
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator).to(getattr(torch, held)) for name, shape in SHAPES.items()}


def _groups(lab: ShardingLab, held: str) -> tuple[ShardingManager, list[QuantizingEngine]]:
    """Ranks whose boundaries are inside blocks, and two replicas."""
    metas = [TensorMeta(name=name, shape=shape, dtype=held) for name, shape in SHAPES.items()]
    state, sources = weights(held), []
    for rank in range(RANKS):
        boxes = []
        for name, shape in SHAPES.items():
            low, high = shape[0] * rank // RANKS, shape[0] * (rank + 1) // RANKS
            boxes.append((name, Box((low, *(0,) * (len(shape) - 1)), (high - low, *shape[1:]))))
        layout = tensor_layout(metas, boxes, rank=rank, process=f"train:{rank}")
        sources.append(TrainHost(TensorTrainEngine(state, layout)))
    engines = [QuantizingEngine(_wanted(replica)) for replica in range(2)]
    train = LocalGroup(sources, backend="train")
    rollout = LocalGroup([RolloutHost(engine) for engine in engines], backend="rollout")
    arguments: dict[str, Any] = {**lab.suite.arguments, "bucket_bytes": 512}
    manager: ShardingManager = lab.manager_class(train, rollout, **arguments)
    return manager, engines


def _wanted(rank: int) -> WeightLayout:
    metas = []
    for name, shape in SHAPES.items():
        scales = BlockScales(name=f"{name}_scale", block=(BLOCK, BLOCK), taken_as="bfloat16")
        is_matrix = len(shape) == 2
        metas.append(
            TensorMeta(
                name=name,
                shape=shape,
                dtype="float8_e4m3fn" if is_matrix else "float32",
                scales=scales if is_matrix else None,
            )
        )
    return tensor_layout(metas, whole_boxes(SHAPES), rank=rank, process=f"rollout:{rank}")
