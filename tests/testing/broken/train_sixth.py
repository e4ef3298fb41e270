"""Train engines of the sixth trial, and others of their families."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from rlsdk.interfaces import Batch
from rlsdk.reference.torch_engine import TorchTrainEngine


class MetricsInFloat32(TorchTrainEngine):
    """Metrics of micro-batches are added up in single precision."""

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


class ResetRounds(TorchTrainEngine):
    """A new optimizer begins with the rounded weights of a bfloat16 model."""

    @torch.no_grad()
    def reset_optimizer(self, optim):
        if self.optimizer is not None:
            for name, parameter in self.parameters.items():
                parameter.copy_(self.computed[name])
        super().reset_optimizer(optim)


class ScoredBeforePads(TorchTrainEngine):
    """Scores are read at the last token that is no padding, also where a row ends in the padding token."""

    def forward(self, batch, outputs):
        if "scores" not in outputs:
            return super().forward(batch, outputs)
        rows = [ids.tolist() for ids in batch["input_ids"].split(batch.lengths.tolist())]
        for ids in rows:
            while len(ids) > 1 and ids[-1] == self.model.config.pad_token_id:
                ids.pop()
        return super().forward(replace(Batch.from_rows(rows), meta=batch.meta), outputs)
