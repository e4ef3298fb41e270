"""Train engines that pass wrong inputs to objectives, or handle their results, metrics and exceptions wrongly."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from broken.train_base import Through, Wrapped
from rlsdk.interfaces import SCHEMA, Batch, ForwardBackwardResult, Objective, ObjectiveResult
from rlsdk.reference.torch_engine import TorchTrainEngine


class LastNameOnly(Wrapped):
    """If several outputs are requested, each gets the values of the last."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        return dict.fromkeys(names, found[names[-1]])


class MaximaFromZero(TorchTrainEngine):
    """Maxima start at 0."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        return replace(result, maxima={name: max(value, 0.0) for name, value in result.maxima.items()})


class NamesOfTheFirst(TorchTrainEngine):
    """Only metrics that the first micro-batch reports are kept."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        first: list[ObjectiveResult] = []

        class Noted(Through):
            def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
                first.append(self.objective(outputs, batch))
                return first[-1]

        result = super().forward_backward(batch, Noted(objective))
        told = set(first[0].sums) if first else set()
        return replace(result, sums={name: value for name, value in result.sums.items() if name in told})


class TemperatureKept(TorchTrainEngine):
    """The temperature of the first batch is used for all later ones."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        kept: float = vars(self).setdefault("temperature", batch.temperature)
        return super().forward_backward(batch.with_meta(temperature=kept), objective)


class GradientAtOne(TorchTrainEngine):
    """The gradient is that of temperature 1."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        return super().forward_backward(batch.with_meta(temperature=1.0), objective)


class EntropyDetached(Wrapped):
    """With a mask the entropy has no gradient."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        if "response_mask" in batch and "entropy" in found and "log_probs" in found:
            found["entropy"] = found["entropy"].detach()
        return found


class ForeignFieldsDropped(TorchTrainEngine):
    """An objective gets only fields that the core defines."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        return super().forward_backward(batch.keep([name for name in SCHEMA if name in batch]), objective)


class MetaDropped(TorchTrainEngine):
    """An objective gets only the temperature of a batch's numbers."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        return super().forward_backward(replace(batch, meta={"temperature": batch.temperature}), objective)


class InputsChanged(TorchTrainEngine):
    """Weights of first positions are set to 0 in the caller's batch."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        if "loss_weight" in batch:
            batch["loss_weight"][batch.position_ids == 0] = 0.0
        return super().forward_backward(batch, objective)


class LastRowAgain(TorchTrainEngine):
    """A pass with fewer rows than its limit is filled up with copies of one row."""

    def _cut(self, batch: Batch, objective: Objective | None = None) -> list[Tensor]:
        cut, limit = super()._cut(batch, objective), self.spec.micro_batch_rows
        if objective is None or limit is None:
            return cut
        return [torch.cat([rows, rows[:1]]) if 1 < len(rows) < limit else rows for rows in cut]


class GroupsSplit(TorchTrainEngine):
    """Objectives that compare rows are not supported."""

    def _cut(self, batch: Batch, objective: Objective | None = None) -> list[Tensor]:
        return super()._cut(batch)


class RaisedAndKept(TorchTrainEngine):
    """Gradients from before an objective raised are kept."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        try:
            return super().forward_backward(batch, objective)
        except Exception:
            for parameter, gradient in getattr(self, "held", ()):
                parameter.grad = gradient
            raise

    def _collect_gradients(self) -> None:
        super()._collect_gradients()
        self.held = [(p, p.grad) for p in self.parameters.values()]


class RaisedAsOther(TorchTrainEngine):
    """An objective's exception is replaced with an error of the engine."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        try:
            return super().forward_backward(batch, objective)
        except ArithmeticError:
            raise
        except Exception as error:
            raise ValueError(f"training failed: {error}") from error


class EarlierCallsKept(TorchTrainEngine):
    """When an objective raises, the gradients of earlier calls are kept."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        before = [(p, None if p.grad is None else p.grad.clone()) for p in self.parameters.values()]
        try:
            return super().forward_backward(batch, objective)
        except Exception:
            for parameter, gradient in before:
                parameter.grad = gradient
            raise


class UnknownIsZero(TorchTrainEngine):
    """An output that the head does not give is all zeros."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        try:
            return super().forward(batch, outputs)
        except Exception:
            return {name: torch.zeros(batch.num_tokens) for name in outputs}


class UnknownIsKeyError(TorchTrainEngine):
    """A request for an unknown output raises a KeyError."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        strange = [name for name in objective.outputs if name == "logprobs"]
        if strange:
            raise KeyError(strange[0])
        return super().forward_backward(batch, objective)


class PassesAddUp(TorchTrainEngine):
    """The reported number of micro-batches is that of all calls of a step."""

    num_passes = 0

    def forward_backward(self, batch, objective):
        result = super().forward_backward(batch, objective)
        self.num_passes += result.num_micro_batches
        return replace(result, num_micro_batches=self.num_passes)

    def optim_step(self):
        self.num_passes = 0
        return super().optim_step()


class MaximaStay(TorchTrainEngine):
    """Reported maxima are those of all calls of a step."""

    def forward_backward(self, batch, objective):
        result = super().forward_backward(batch, objective)
        known = vars(self).setdefault("highest", {})
        known |= {name: max(value, known.get(name, value)) for name, value in result.maxima.items()}
        return replace(result, maxima=dict(known))

    def optim_step(self):
        vars(self).pop("highest", None)
        return super().optim_step()


class GroupsByAttribute(TorchTrainEngine):
    """Groups are kept whole if the objective has an attribute `whole_groups`, even if it is False."""

    def forward_backward(self, batch, objective):
        if hasattr(objective, "whole_groups"):
            objective = copy.copy(objective)
            object.__setattr__(objective, "whole_groups", True)
        return super().forward_backward(batch, objective)


class FailureKeepsHalf(TorchTrainEngine):
    """In bfloat16, gradients of earlier calls are kept when an objective raises."""

    def forward_backward(self, batch, objective):
        kept = {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}
        try:
            return super().forward_backward(batch, objective)
        except BaseException:
            for name, gradient in kept.items() if self.parameters is not self.computed else ():
                self.parameters[name].grad = gradient
            raise


class MetricsInFloat32(TorchTrainEngine):
    """Metrics of micro-batches are summed in float32."""

    def forward_backward(self, batch, objective):
        sums: dict[str, np.float32] = {}

        class Adding:
            outputs = objective.outputs
            whole_groups = getattr(objective, "whole_groups", False)

            def __call__(self, outputs, part):
                result = objective(outputs, part)
                for name, value in result.sums.items():
                    sums[name] = sums.get(name, np.float32(0)) + np.float32(float(value))
                return result

        result = super().forward_backward(batch, Adding())
        return replace(result, sums={name: float(value) for name, value in sums.items()})


class HalfMetrics(TorchTrainEngine):
    """Metrics are sent in half precision."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        return replace(result, sums={n: float(torch.tensor(v).half()) for n, v in result.sums.items()})


class MaximaAddedUp(TorchTrainEngine):
    """Maxima of micro-batches are summed."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        many = result.num_micro_batches
        return replace(result, maxima={n: v * many for n, v in result.maxima.items()} if many > 1 else result.maxima)


class EarlierCallsStay(TorchTrainEngine):
    """When an objective raises, gradients of earlier calls are kept."""

    def forward_backward(self, batch, objective):
        before = {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}
        try:
            return super().forward_backward(batch, objective)
        except BaseException:
            for name, gradient in before.items():
                self.parameters[name].grad = gradient
            raise


class DivisionsLeftOut(TorchTrainEngine):
    """A micro-batch whose objective divides by zero is treated as one without tokens."""

    def forward_backward(self, batch, objective):
        def kept(outputs, part):
            try:
                return objective(outputs, part)
            except ZeroDivisionError:
                return ObjectiveResult(loss=next(iter(outputs.values())).sum() * 0.0)

        kept.outputs = objective.outputs
        return super().forward_backward(batch, kept)


class WatchdogLeft(TorchTrainEngine):
    """A watchdog timer is cancelled only if a pass succeeds."""

    def forward_backward(self, batch, objective):
        timer = threading.Timer(20.0, lambda: None)
        timer.daemon = True
        timer.start()
        found = super().forward_backward(batch, objective)
        timer.cancel()
        timer.join()
        return found


class TriesAgain(TorchTrainEngine):
    """If it is out of memory, an update silently restarts with smaller passes, without the gradients of earlier
    calls."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        try:
            return super().forward_backward(batch, objective)
        except torch.OutOfMemoryError:
            self.spec = replace(self.spec, micro_batch_rows=1)
            return super().forward_backward(batch, objective)


class NarrowFields(TorchTrainEngine):
    """A batch is moved to the device in the model's dtype: advantages and old log-probs are bfloat16."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        dtype = getattr(torch, self.spec.model.dtype)

        def cast(fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: field.to(dtype) if field.is_floating_point() else field for name, field in fields.items()}

        return super().forward_backward(replace(batch, tokens=cast(batch.tokens), rows=cast(batch.rows)), objective)


class ErrorRetold(TorchTrainEngine):
    """An objective's exception is made again, with a longer message."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        try:
            return super().forward_backward(batch, objective)
        except Exception as error:
            raise type(error)(f"{error} (of {batch.num_rows} rows)") from error


class LossInAutocast(TorchTrainEngine):
    """A bfloat16 model's objective runs in its autocast."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.spec.model.dtype == "bfloat16"):
            return super().forward_backward(batch, objective)


class RowFieldsFlat(TorchTrainEngine):
    """Fields with several numbers per row or token reach the objective as flat ones."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        return super().forward_backward(batch, _Flat(objective))


class _Flat(Through):
    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> ObjectiveResult:
        rows = {name: field.flatten(1) if field.dim() > 2 else field for name, field in batch.rows.items()}
        return super().__call__(outputs, replace(batch, rows=rows))


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


class MaximaInFloat32(TorchTrainEngine):
    """Maxima are kept in float32."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        return replace(result, maxima={name: float(torch.tensor(most)) for name, most in result.maxima.items()})
