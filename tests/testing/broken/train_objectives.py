"""Train engines that pass wrong inputs to objectives, or handle their results, metrics and exceptions wrongly."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from broken.defect import defect
from broken.train_base import Through, Wrapped
from rlsdk.interfaces import SCHEMA, Batch, ForwardBackwardResult, Objective, ObjectiveResult
from rlsdk.reference.torch_engine import TorchTrainEngine


@defect({"objective.both": "log_probs"})
class LastNameOnly(Wrapped):
    """If several outputs are requested, each gets the values of the last."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        return dict.fromkeys(names, found[names[-1]])


@defect({"objective.metrics": "maximum"})
class MaximaFromZero(TorchTrainEngine):
    """Maxima start at 0."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        return replace(result, maxima={name: max(value, 0.0) for name, value in result.maxima.items()})


@defect({"objective.temperature": "largest difference"})
class TemperatureKept(TorchTrainEngine):
    """The temperature of the first batch is used for all later ones."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        kept: float = vars(self).setdefault("temperature", batch.temperature)
        return super().forward_backward(batch.with_meta(temperature=kept), objective)


@defect({"objective.temperature": "largest difference"})
class GradientAtOne(TorchTrainEngine):
    """The gradient is that of temperature 1."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        return super().forward_backward(batch.with_meta(temperature=1.0), objective)


@defect({"objective.both": "largest difference of loss"})
class EntropyDetached(Wrapped):
    """With a mask the entropy has no gradient."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        if "response_mask" in batch and "entropy" in found and "log_probs" in found:
            found["entropy"] = found["entropy"].detach()
        return found


@defect({"objective.inputs": "has no field"})
class ForeignFieldsDropped(TorchTrainEngine):
    """An objective gets only fields that the core defines."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        return super().forward_backward(batch.keep([name for name in SCHEMA if name in batch]), objective)


@defect({"objective.inputs": "lost"})
class MetaDropped(TorchTrainEngine):
    """An objective gets only the temperature of a batch's numbers."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        return super().forward_backward(replace(batch, meta={"temperature": batch.temperature}), objective)


@defect({"objective.whole_groups": "largest difference"})
class GroupsSplit(TorchTrainEngine):
    """Objectives that compare rows are not supported."""

    def _cut(self, batch: Batch, objective: Objective | None = None) -> list[Tensor]:
        return super()._cut(batch)


@defect({"objective.unknown_output": "accepted"})
class UnknownIsZero(TorchTrainEngine):
    """An output that the head does not give is all zeros."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        try:
            return super().forward(batch, outputs)
        except Exception:
            return {name: torch.zeros(batch.num_tokens) for name in outputs}


@defect({"objective.unknown_output": "logprobs"})
class UnknownIsKeyError(TorchTrainEngine):
    """A request for an unknown output raises a KeyError."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        strange = [name for name in objective.outputs if name == "logprobs"]
        if strange:
            raise KeyError(strange[0])
        return super().forward_backward(batch, objective)


@defect({"objective.whole_groups": "not asked for"})
class GroupsByAttribute(TorchTrainEngine):
    """Groups are kept whole if the objective has an attribute `whole_groups`, even if it is False."""

    def forward_backward(self, batch, objective):
        if hasattr(objective, "whole_groups"):
            objective = copy.copy(objective)
            object.__setattr__(objective, "whole_groups", True)
        return super().forward_backward(batch, objective)


@defect({"objective.raises": "required positional argument"})
class ErrorRetold(TorchTrainEngine):
    """An objective's exception is made again, with a longer message."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        try:
            return super().forward_backward(batch, objective)
        except Exception as error:
            raise type(error)(f"{error} (of {batch.num_rows} rows)") from error


@defect({"objective.inputs": "fields that are not their row's"})
class RowFieldsFlat(TorchTrainEngine):
    """Fields with several numbers per row or token reach the objective as flat ones."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        return super().forward_backward(batch, _Flat(objective))


class _Flat(Through):
    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        rows = {name: field.flatten(1) if field.dim() > 2 else field for name, field in batch.rows.items()}
        return super().__call__(outputs, replace(batch, rows=rows))


@defect({"objective.metrics": "loss of a large count"})
class LossInFloat32(TorchTrainEngine):
    """The reported loss is added up in float32."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        kept = _KeepsLosses(objective)
        return replace(super().forward_backward(batch, kept), loss=float(kept.total))


class _KeepsLosses(Through):
    total = torch.zeros(())

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        result = super().__call__(outputs, batch)
        self.total = self.total + result.loss.detach()
        return result


@defect({"objective.metrics": "maximum of large counts"})
class MaximaInFloat32(TorchTrainEngine):
    """Maxima are kept in float32."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        return replace(result, maxima={name: float(torch.tensor(most)) for name, most in result.maxima.items()})
