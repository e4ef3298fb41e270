"""Train engines that offload wrongly, or lose what they offload."""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from broken.defect import defect
from rlsdk.interfaces import TrainEngine
from rlsdk.kit.memory.memory_parts import TRAIN_PARTS
from rlsdk.kit.model.hf import build_model, canonical_parameters
from rlsdk.reference.torch_engine import MOMENTS, TorchTrainEngine


@defect({"registration.capabilities": "offload is claimed", "offload": "does not support"})
class OffloadAbsent(TorchTrainEngine):
    """Claims offloading, but has the interface's defaults, which refuse."""

    offload = TrainEngine.offload
    onload = TrainEngine.onload


@defect({"offload": "largest difference of weights"})
class GradientsLost(TorchTrainEngine):
    """Parts that are offloaded with gradients are restored without them."""

    def onload(self, parts: Sequence[str] = ("weights", "optimizer", "gradients")) -> None:
        super().onload(parts)
        if "gradients" in parts and self.optimizer is not None:
            self.optimizer.zero_grad()


@defect({"offload.any_time": "largest difference"})
class MomentsStayAway(TorchTrainEngine):
    """Moments that were offloaded alone are restored as zeros."""

    def onload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        super().onload(parts)
        if "optimizer" in parts and "weights" not in parts and self.optimizer is not None:
            for state in self.optimizer.state.values():
                state["exp_avg"].zero_()


@defect({"offload.any_time": "exp_avg"})
class OffloadNeedsMoments(TorchTrainEngine):
    """Offloading before the first step, without moments, is an error."""

    def offload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        if "optimizer" in parts and self.optimizer is not None and not self.optimizer.state:
            raise KeyError("exp_avg")
        super().offload(parts)


@defect({"offload.frozen": "largest difference"})
class FrozenDoesNotReturn(TorchTrainEngine):
    """A frozen model's weights are restored rounded."""

    def onload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        super().onload(parts)
        if self.optimizer is None:
            for parameter in self.parameters.values():
                parameter.data = parameter.data.bfloat16().float()


@defect({"offload.changed": "changed by a checkpoint"})
class OffloadsWhatStepsChanged(TorchTrainEngine):
    """Moments are copied to the host only if a step changed them since the last copy; a loaded checkpoint is not
    considered."""

    is_copied = False

    def initialize(self, ctx, spec):
        self.host = {}
        super().initialize(ctx, spec)

    def optim_step(self):
        self.is_copied = False
        return super().optim_step()

    def offload(self, parts=TRAIN_PARTS):
        if "optimizer" in parts:
            for name, state in self._moments():
                for moment in MOMENTS:
                    if not self.is_copied or (name, moment) not in self.host:
                        self.host[name, moment] = state[moment].clone()
                    state[moment].zero_()
            self.is_copied = True
        super().offload(parts)

    def onload(self, parts=TRAIN_PARTS):
        super().onload(parts)
        for name, state in self._moments() if "optimizer" in parts else ():
            for moment in MOMENTS:
                state[moment].copy_(self.host[name, moment])


@defect({"offload.any_time": "largest difference"})
class MomentsSwapped(TorchTrainEngine):
    """If weights are not offloaded, the two moments are swapped when they are restored."""

    def onload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        super().onload(parts)
        if tuple(parts) == ("optimizer", "gradients") and self.optimizer is not None:
            for state in self.optimizer.state.values():
                state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


@defect({"random_calls.frozen": "layout changed"})
class FrozenReadAgain(TorchTrainEngine):
    """A frozen model's weights are dropped by `offload`, and read from the model's folder again by `onload`."""

    def offload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        if self.spec.optim is not None:
            super().offload(parts)
        elif "weights" in parts:
            for parameter in self.parameters.values():
                parameter.data = torch.empty(0)

    def onload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        if self.spec.optim is not None:
            super().onload(parts)
        elif "weights" in parts:
            again = build_model(self.spec.model, device=self.device, seed=self.ctx.seed, init_from_config=False)
            for name, parameter in canonical_parameters(again)[0].items():
                self.parameters[name].data = parameter.data


@defect({"close": "temporary folder"})
class SwapFilesStay(TorchTrainEngine):
    """Each `offload` writes a file outside of `scratch_dir`, which is removed when the process ends."""

    def offload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        handle, name = tempfile.mkstemp(prefix="swap-")
        os.close(handle)
        atexit.register(Path(name).unlink, missing_ok=True)
        super().offload(parts)
