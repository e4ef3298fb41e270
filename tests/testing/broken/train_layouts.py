"""Train engines that describe or hand out their weights wrongly: layouts, shards, forecasts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from broken.defect import defect
from rlsdk.interfaces import OptimStepResult, WeightLayout, WeightShard
from rlsdk.reference.torch_engine import TorchTrainEngine


@defect({"layout": "shards that are copies"})
class CopiesForShards(TorchTrainEngine):
    """`shards` yields copies."""

    def shards(self) -> Iterator[WeightShard]:
        for shard in super().shards():
            yield replace(shard, tensor=shard.tensor.clone())


@defect(
    {
        "layout": "a step did not change",
        "gradient": "difference of",
        "gradient.mask": "difference of",
        "gradient.entropy": "difference of",
        "gradient.values": "difference of",
        "gradient.scores": "difference of",
        "gradient.padding": "difference of",
        "gradient.calls": "difference of",
        "step.clipping": "difference of",
        "step.schedule": "difference of",
    }
)
class OneTensorFrozen(TorchTrainEngine):
    """One bias is never trained, because the optimizer lacks it."""

    def optim_step(self) -> OptimStepResult:
        frozen = self.parameters["model.layers.0.self_attn.q_proj.bias"]
        before = frozen.detach().clone()
        result = super().optim_step()
        with torch.no_grad():
            frozen.copy_(before)
        return result


@defect({"read_only.layout": "another dtype"})
class ShardsOfAnotherType(TorchTrainEngine):
    """The layout has bfloat16, but shards are float32."""

    def layout(self) -> WeightLayout:
        found = super().layout()
        return replace(found, tensors=tuple(replace(meta, dtype="bfloat16") for meta in found.tensors))


@defect({"layout.place": "another node"})
class NodeUnknown(TorchTrainEngine):
    """The layout has a node name of its own."""

    def layout(self) -> WeightLayout:
        return replace(super().layout(), node="here")


@defect({"model.tied": "not in the layout"})
class TiedTheOtherWay(TorchTrainEngine):
    """The layout maps tied names in the wrong direction."""

    def layout(self) -> WeightLayout:
        found = super().layout()
        return replace(found, tied={of: name for name, of in found.tied.items()})


@defect({"layout": "node:pid"})
class SaysItsNodeOnly(TorchTrainEngine):
    """The layout's process is only the node."""

    def layout(self) -> WeightLayout:
        return replace(super().layout(), process=self.ctx.node)


@defect({"layout.kinds": "faults, bfloat16"})
class LayoutSaysWhatComputes(TorchTrainEngine):
    """In bfloat16, the layout has bfloat16, but shards are float32."""

    def layout(self):
        found = super().layout()
        return replace(found, tensors=tuple(replace(meta, dtype=self.spec.model.dtype) for meta in found.tensors))


@defect({"model.buffers": "no rank holds", "random_calls.models": "routed"})
class BuffersNotServed(TorchTrainEngine):
    """`layout` and `shards` have parameters only, no persistent buffers."""

    def _served(self) -> dict[str, Tensor]:
        return dict(self.parameters)


@defect({"read_only.layout": "two iterations of shards"})
class OneCursor(TorchTrainEngine):
    """All iterations of `shards` share their position."""

    def shards(self) -> Iterator[WeightShard]:
        self.rest = super().shards()
        while (shard := next(self.rest, None)) is not None:
            yield shard
