"""Train engines that are wrong only with training in bfloat16, whose numbers are not plain torch's anyway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from broken.defect import defect
from broken.train_base import Wrapped
from rlsdk.interfaces import Batch, OptimSpec
from rlsdk.reference.torch_engine import TorchTrainEngine
from rlsdk_fsdp.engine import FsdpTrainEngine


def is_half(engine: TorchTrainEngine | FsdpTrainEngine) -> bool:
    return engine.spec.model.dtype == "bfloat16"


@defect({"model.bfloat16_steps": "difference of"})
class HalfDefaultEps(TorchTrainEngine):
    """The optimizer of the float32 weights is built without eps."""

    def reset_optimizer(self, optim: OptimSpec) -> None:
        super().reset_optimizer(replace(optim, eps=1e-8) if is_half(self) else optim)


@defect({"model.bfloat16_steps": "difference of a rate"})
class HalfUnscheduled(TorchTrainEngine):
    """The rate of the float32 weights is constant."""

    def reset_optimizer(self, optim: OptimSpec) -> None:
        super().reset_optimizer(replace(optim, schedule="constant", warmup_steps=0) if is_half(self) else optim)


@defect({"model.bfloat16_steps": "difference of a norm"})
class HalfAtOne(Wrapped):
    """Logits are not divided by the temperature."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        return super().run(batch.with_meta(temperature=1.0) if is_half(self) else batch, names)


@defect({"ranks.bfloat16_steps": "change of weights"}, ranks=True)
class HalfRanksDecayTwice(FsdpTrainEngine):
    """On several ranks, the weights decay twice."""

    def reset_optimizer(self, optim: OptimSpec) -> None:
        twice = is_half(self) and self.ctx.world_size > 1
        super().reset_optimizer(replace(optim, weight_decay=2 * optim.weight_decay) if twice else optim)
