"""Train engines that are wrong with an adapter only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from broken.defect import defect
from rlsdk.interfaces import Batch, OptimSpec, OptimStepResult, RankContext, TrainSpec, WeightPart, WeightShard
from rlsdk.kit.model.optim import build_optimizer
from rlsdk.reference.torch_engine import TorchTrainEngine


@defect({"adapter.steps": "weights"})
class ScaledTwice(TorchTrainEngine):
    """The adapter's scale is applied twice in the weights that are served."""

    def _merged(self, name: str, weight: Tensor) -> Tensor:
        merged = super()._merged(name, weight)
        return merged if self.adapter is None else weight + self.adapter.spec.scale * (merged - weight)


@defect({"adapter.steps": "weights"})
class NotServed(TorchTrainEngine):
    """Shards are those of the model without its adapter."""

    def shards(self) -> Iterator[WeightShard]:
        for shard in super().shards():
            yield replace(shard, tensor=self._served()[shard.name].detach())


@defect({"adapter.steps": "frozen weights that moved"})
class NudgedBase(TorchTrainEngine):
    """Each step leaves a rounding error in a frozen weight, as merging an adapter and taking it out again does."""

    def optim_step(self) -> OptimStepResult:
        result = super().optim_step()
        if self.adapter is not None:
            self.computed["model.norm.weight"].data[0] += 1e-6
        return result


@defect({"adapter.steps": "loss"})
class Thawed(TorchTrainEngine):
    """The frozen weights are trained, too."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        if self.adapter is not None and spec.optim is not None:
            self.model.requires_grad_(True)
            self.reset_optimizer(spec.optim)

    def reset_optimizer(self, optim: OptimSpec) -> None:
        super().reset_optimizer(optim)
        if self.adapter is not None:
            self.optimizer = build_optimizer([*self.parameters.items(), *self.computed.items()], optim)

    def optim_step(self) -> OptimStepResult:
        result = super().optim_step()
        if self.adapter is not None:
            self.model.zero_grad()
        return result


@defect({"adapter.off": "model without an adapter"})
class NeverOff(TorchTrainEngine):
    """The reference computes with the adapter."""

    def forward_reference(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        return self.forward(batch, outputs)


@defect({"adapter.off": "norms"})
class StaysOff(TorchTrainEngine):
    """After the reference was asked, the adapter is not trained any more."""

    def forward_reference(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = super().forward_reference(batch, outputs)
        for parameter in self.parameters.values():
            parameter.requires_grad_(False)
        self.model.get_input_embeddings().register_forward_hook(lambda module, inputs, out: out.requires_grad_())
        return found


@defect({"adapter.kept": "kept policy"})
class KeepsNothing(TorchTrainEngine):
    """The reference is always the model without its adapter."""

    def keep_reference(self) -> None:
        """Does nothing."""


@defect({"adapter.kept": "after loading"})
class ReferenceNotSaved(TorchTrainEngine):
    """A checkpoint lacks the kept adapter."""

    def save_checkpoint(self, path: Path) -> None:
        kept, self.reference = self.reference, None
        super().save_checkpoint(path)
        self.reference = kept


@defect({"adapter.checkpoint": "other weights"})
class AnyBase(TorchTrainEngine):
    """A checkpoint does not say which frozen weights it belongs to."""

    def _base_digest(self) -> str | None:
        return None if self.adapter is None else f"any scale {self.adapter.spec.scale:g}"


@defect({"adapter.checkpoint": "size of the checkpoint"})
class WholeCheckpoint(TorchTrainEngine):
    """A checkpoint holds the frozen weights as well."""

    def save_checkpoint(self, path: Path) -> None:
        super().save_checkpoint(path)
        if self.adapter is not None:
            from safetensors.torch import save_file

            save_file({name: p.detach() for name, p in self.computed.items()}, path / "base.safetensors")


@defect({"adapter.export": "starts from it"})
class ExportOfTheStart(TorchTrainEngine):
    """An exported adapter has the first values of A."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        self.first = {name: p.detach().clone() for name, p in self.parameters.items()}

    def save_pretrained(self, path: Path) -> None:
        if self.adapter is None:
            return super().save_pretrained(path)
        own = {name: p.detach().clone() for name, p in self.parameters.items()}
        self._fill({name: self.first[name] if "lora_A" in name else p for name, p in own.items()})
        super().save_pretrained(path)
        self._fill(own)
        return None

    @torch.no_grad()
    def _fill(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])


@defect({"adapter.parts": "moved below"})
class MergedBelow(TorchTrainEngine):
    """The weights below the adapter are handed out with the adapter added, which engines then add again."""

    def part_shards(self, part: WeightPart) -> Iterator[WeightShard]:
        return self.shards() if part is WeightPart.BASE else super().part_shards(part)


@defect({"adapter.parts": "difference of the shards"})
class StaleAdapter(TorchTrainEngine):
    """The adapter is handed out as it was when its part was first described."""

    first: dict[str, Tensor] | None = None

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        if self.adapter is not None:
            self.first = {name: p.detach().clone() for name, p in self.parameters.items()}

    def part_shards(self, part: WeightPart) -> Iterator[WeightShard]:
        for shard in super().part_shards(part):
            old = None if self.first is None or part is WeightPart.BASE else self.first[shard.name]
            yield shard if old is None else replace(shard, tensor=old)


@defect({"adapter.parts": "difference of the shards"})
class ScaledParts(TorchTrainEngine):
    """B is handed out with the scale in it, which engines then apply again."""

    def part_shards(self, part: WeightPart) -> Iterator[WeightShard]:
        for shard in super().part_shards(part):
            is_b = self.adapter is not None and ".lora_B." in shard.name
            yield replace(shard, tensor=shard.tensor * self.adapter.spec.scale) if is_b and self.adapter else shard
