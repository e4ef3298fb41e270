"""Train engines that describe or hand out their weights wrongly: layouts, shards, forecasts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from rlsdk.interfaces import OptimStepResult, WeightLayout, WeightShard
from rlsdk.reference.torch_engine import TorchTrainEngine


class CopiesForShards(TorchTrainEngine):
    """`shards` yields copies."""

    def shards(self) -> Iterator[WeightShard]:
        for shard in super().shards():
            yield replace(shard, tensor=shard.tensor.clone())


class OneTensorFrozen(TorchTrainEngine):
    """One bias is never trained, because the optimizer lacks it."""

    def optim_step(self) -> OptimStepResult:
        frozen = self.parameters["model.layers.0.self_attn.q_proj.bias"]
        before = frozen.detach().clone()
        result = super().optim_step()
        with torch.no_grad():
            frozen.copy_(before)
        return result


class LayoutCounts(TorchTrainEngine):
    """After a step, the order of the layout and of the shards changes."""

    def layout(self) -> WeightLayout:
        found = super().layout()
        return found if not self.num_steps else replace(found, boxes=found.boxes[1:] + found.boxes[:1])

    def shards(self) -> Iterator[WeightShard]:
        found = list(super().shards())
        yield from found if not self.num_steps else found[1:] + found[:1]


class ShardsOfAnotherType(TorchTrainEngine):
    """The layout has bfloat16, but shards are float32."""

    def layout(self) -> WeightLayout:
        found = super().layout()
        return replace(found, tensors=tuple(replace(meta, dtype="bfloat16") for meta in found.tensors))


class NodeUnknown(TorchTrainEngine):
    """The layout has a node name of its own."""

    def layout(self) -> WeightLayout:
        return replace(super().layout(), node="here")


class TiedTheOtherWay(TorchTrainEngine):
    """The layout maps tied names in the wrong direction."""

    def layout(self) -> WeightLayout:
        found = super().layout()
        return replace(found, tied={of: name for name, of in found.tied.items()})


class SaysItsNodeOnly(TorchTrainEngine):
    """The layout's process is only the node."""

    def layout(self) -> WeightLayout:
        return replace(super().layout(), process=self.ctx.node)


class LayoutSaysWhatComputes(TorchTrainEngine):
    """In bfloat16, the layout has bfloat16, but shards are float32."""

    def layout(self):
        found = super().layout()
        return replace(found, tensors=tuple(replace(meta, dtype=self.spec.model.dtype) for meta in found.tensors))


class BuffersNotServed(TorchTrainEngine):
    """`layout` and `shards` have parameters only, no persistent buffers."""

    def _served(self) -> dict[str, Tensor]:
        return dict(self.parameters)


class OneCursor(TorchTrainEngine):
    """All iterations of `shards` share their position."""

    def shards(self) -> Iterator[WeightShard]:
        self.rest = super().shards()
        while (shard := next(self.rest, None)) is not None:
            yield shard


class BusyUntilTheEnd(TorchTrainEngine):
    """A sync that stopped early keeps others from reading."""

    busy = False

    def shards(self) -> Iterator[WeightShard]:
        if self.busy:
            raise RuntimeError("the weights are being read")
        self.busy = True
        yield from super().shards()
        self.busy = False
