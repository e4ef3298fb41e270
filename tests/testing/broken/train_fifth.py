"""Train engines of the fifth trial, and others of their families."""

from __future__ import annotations

import copy
import shutil
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch

from rlsdk.reference.torch_engine import TorchTrainEngine


class PassesAddUp(TorchTrainEngine):
    """The number of micro-batches is that of all calls of a step."""

    num_passes = 0

    def forward_backward(self, batch, objective):
        result = super().forward_backward(batch, objective)
        self.num_passes += result.num_micro_batches
        return replace(result, num_micro_batches=self.num_passes)

    def optim_step(self):
        self.num_passes = 0
        return super().optim_step()


class MaximaStay(TorchTrainEngine):
    """Maxima are those of all calls of a step."""

    def forward_backward(self, batch, objective):
        result = super().forward_backward(batch, objective)
        known = vars(self).setdefault("highest", {})
        known |= {name: max(value, known.get(name, value)) for name, value in result.maxima.items()}
        return replace(result, maxima=dict(known))

    def optim_step(self):
        vars(self).pop("highest", None)
        return super().optim_step()


class GroupsByAttribute(TorchTrainEngine):
    """Groups are kept whole where the objective has an attribute `whole_groups`, True or not."""

    def forward_backward(self, batch, objective):
        if hasattr(objective, "whole_groups"):
            objective = copy.copy(objective)
            object.__setattr__(objective, "whole_groups", True)
        return super().forward_backward(batch, objective)


class HeadsInHalf(TorchTrainEngine):
    """Outputs of heads have the model's dtype."""

    def forward(self, batch, outputs):
        dtype = getattr(torch, self.spec.model.dtype)
        found = super().forward(batch, outputs)
        return {name: values if name == "log_probs" else values.to(dtype) for name, values in found.items()}


class LackingMomentsAreZero(TorchTrainEngine):
    """Moments that a checkpoint lacks are zero."""

    def _check_fit(self, path, tensors):
        if any(name.startswith("exp_avg") for name in tensors):
            for name, parameter in self.parameters.items():
                for moment in ("exp_avg", "exp_avg_sq"):
                    tensors.setdefault(f"{moment}/{name}", torch.zeros_like(parameter))
        super()._check_fit(path, tensors)


class SavedInAThread(TorchTrainEngine):
    """A thread moves the checkpoint to its place, a little after it was saved."""

    def save_checkpoint(self, path):
        aside = Path(tempfile.mkdtemp())
        super().save_checkpoint(aside)

        def move():
            time.sleep(0.05)
            shutil.copytree(aside, path, dirs_exist_ok=True)
            shutil.rmtree(aside)

        threading.Thread(target=move).start()


class OptimizerFolderStays(TorchTrainEngine):
    """A folder of every engine stays in the machine's temporary folder."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        tempfile.mkdtemp(prefix="optimizer-")
