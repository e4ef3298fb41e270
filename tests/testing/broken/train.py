"""Train engines with one defect each: the reference engine, and what a hurried author might get wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import (
    Batch,
    ForwardBackwardResult,
    Objective,
    ObjectiveResult,
    OptimStepResult,
    RankContext,
    TrainEngine,
    TrainSpec,
    WeightShard,
)
from rlsdk.reference.torch_engine import TorchTrainEngine

MIB = 2**20


class BeforeTemperature(TorchTrainEngine):
    """Log-probs are of the logits before they are divided by the temperature."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        return super().forward(batch if "entropy" in outputs else batch.with_meta(temperature=1.0), outputs)


class EntropyInBits(TorchTrainEngine):
    """Entropy without gradient is of the logarithm to base 2."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = super().forward(batch, outputs)
        return {name: values * 1.4427 if name == "entropy" else values for name, values in found.items()}


class ValuesOneLate(TorchTrainEngine):
    """The value at t is the head's number at t, when asked without gradient."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = super().forward(batch, outputs)
        return {name: values.roll(-1) if name == "values" else values for name, values in found.items()}


class ScoresAbsent(TorchTrainEngine):
    """Claims score models, and gives one zero a row."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = super().forward(batch, outputs)
        return {name: values * 0 if name == "scores" else values for name, values in found.items()}


class MaskOneEarly(TorchTrainEngine):
    """The response mask is taken to speak of the position that predicts: off by one."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        return super().forward(early(batch), outputs)

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        return super().forward_backward(early(batch), objective)


def early(batch: Batch) -> Batch:
    if "response_mask" not in batch:
        return batch
    return batch.with_tokens(response_mask=batch["response_mask"].roll(-1))


class RowsSorted(TorchTrainEngine):
    """Outputs come in the order in which rows were run: by length."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = super().forward(batch, outputs)
        if self.spec.micro_batch_rows is None or batch.num_rows == 0:
            return found
        at = batch.token_index(batch.lengths.argsort(stable=True))
        return {name: values[at] for name, values in found.items()}


class NoRowsFail(TorchTrainEngine):
    """A rank without rows is an error."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        if batch.num_rows == 0:
            raise IndexError("list index out of range")
        return super().forward(batch, outputs)


class PadsInSecret(TorchTrainEngine):
    """Claims to pack, and runs rectangles."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        outputs = self.outputs

        def padded(batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
            found: dict[str, Tensor] = outputs(batch, names, False)
            return found

        self.outputs = padded  # type: ignore[assignment]


class Averaged:
    """An objective whose loss is divided by a number."""

    def __init__(self, objective: Objective, by: float) -> None:
        self.objective, self.by = objective, by

    @property
    def outputs(self) -> Sequence[str]:
        return self.objective.outputs

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        result = self.objective(outputs, batch)
        return replace(result, loss=result.loss / self.by)


class MeanOfMeans(TorchTrainEngine):
    """The losses of micro-batches are averaged."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        return super().forward_backward(batch, Averaged(objective, len(self._cut(batch))))


class FirstCallForgotten(TorchTrainEngine):
    """Every call begins with zero gradients: of several calls the last one's are left."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        return super().forward_backward(batch, objective)


class ClippedNormTold(TorchTrainEngine):
    """The norm that is told is the one after clipping."""

    def optim_step(self) -> OptimStepResult:
        result = super().optim_step()
        limit = self.spec.optim.max_grad_norm if self.spec.optim else None
        return result if limit is None else replace(result, grad_norm=min(result.grad_norm, limit))


class ScheduleOneLate(TorchTrainEngine):
    """With a decay, every step uses the rate of the step before."""

    def optim_step(self) -> OptimStepResult:
        late = self.optim is not None and self.optim.min_lr_ratio > 0 and self.num_steps > 0
        self.num_steps -= late
        result = super().optim_step()
        self.num_steps += late
        return result


class StepsOnNaN(TorchTrainEngine):
    """A gradient that is not finite counts as a step of the schedule."""

    def optim_step(self) -> OptimStepResult:
        result = super().optim_step()
        self.num_steps += result.skipped
        return result


class CopiesForShards(TorchTrainEngine):
    """`shards` hands out copies."""

    def shards(self) -> Iterator[WeightShard]:
        for shard in super().shards():
            yield replace(shard, tensor=shard.tensor.clone())


class OneTensorFrozen(TorchTrainEngine):
    """One bias is never trained: it was left out of the optimizer."""

    def optim_step(self) -> OptimStepResult:
        frozen = self.parameters["model.layers.0.self_attn.q_proj.bias"]
        before = frozen.detach().clone()
        result = super().optim_step()
        with torch.no_grad():
            frozen.copy_(before)
        return result


class MomentsForgotten(TorchTrainEngine):
    """A checkpoint has no moments."""

    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        if self.optimizer is not None:
            self.optimizer.state.clear()


class ScheduleForgotten(TorchTrainEngine):
    """A checkpoint does not say how many steps were made."""

    def load_checkpoint(self, path: Path) -> None:
        super().load_checkpoint(path)
        self.num_steps = 0


class DamageLoaded(TorchTrainEngine):
    """An empty folder is taken for a checkpoint without news."""

    def load_checkpoint(self, path: Path) -> None:
        if any(path.iterdir()):
            super().load_checkpoint(path)


class ExportOfTheFirst(TorchTrainEngine):
    """One tensor is exported as it was when the engine was built."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        self.first = self.parameters["model.norm.weight"].detach().clone()

    def save_pretrained(self, path: Path) -> None:
        parameter = self.parameters["model.norm.weight"]
        trained = parameter.detach().clone()
        with torch.no_grad():
            parameter.copy_(self.first)
            super().save_pretrained(path)
            parameter.copy_(trained)


class OffloadAbsent(TorchTrainEngine):
    """Claims to offload, and has the interface's, which refuses."""

    offload = TrainEngine.offload
    onload = TrainEngine.onload


class GradientsLost(TorchTrainEngine):
    """What is offloaded with gradients comes back without them."""

    def onload(self, parts: Sequence[str] = ("weights", "optimizer", "gradients")) -> None:
        super().onload(parts)
        if "gradients" in parts and self.optimizer is not None:
            self.optimizer.zero_grad()


class FrozenInHalf(TorchTrainEngine):
    """A model that is not trained is held in bfloat16, whatever dtype was asked for."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        if spec.optim is None:
            for parameter in self.parameters.values():
                parameter.data = parameter.data.bfloat16().float()


class AnySize(TorchTrainEngine):
    """A world of two ranks is two engines that know nothing of each other."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(replace(ctx, rank=0, world_size=1), spec)


class Leaks(TorchTrainEngine):
    """A MiB of every step is kept."""

    def optim_step(self) -> OptimStepResult:
        self.kept: list[Any] = [*getattr(self, "kept", ()), bytearray(b"x" * MIB)]
        return super().optim_step()


class LeavesMemory(TorchTrainEngine):
    """Each engine leaves a piece of shared memory."""

    left: list[Any] = []  # noqa: RUF012 - of all engines together: that is the defect

    def close(self) -> None:
        from multiprocessing.shared_memory import SharedMemory

        if hasattr(self, "model") and self.num_steps:
            self.left.append(SharedMemory(create=True, size=4096))
        super().close()
