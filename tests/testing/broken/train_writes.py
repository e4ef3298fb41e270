"""Train engines that write, and do not say when they could not."""

from __future__ import annotations

import threading
from contextlib import suppress

import torch

from rlsdk.interfaces import ObjectiveResult
from rlsdk.reference.torch_engine import TorchTrainEngine


class ExportErrorsLost(TorchTrainEngine):
    """What a thread that writes an export raises is not looked at."""

    def save_pretrained(self, path):
        with suppress(OSError):
            super().save_pretrained(path)


class CheckpointErrorsLost(TorchTrainEngine):
    """A checkpoint that could not be written is logged, and training goes on."""

    def save_checkpoint(self, path):
        with suppress(OSError):
            super().save_checkpoint(path)


class ExportOfAStep(TorchTrainEngine):
    """What an export is written from is kept as long as the count of steps is the same."""

    def save_pretrained(self, path):
        now = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        if getattr(self, "kept", (None, None))[0] != self.num_steps:
            self.kept = self.num_steps, now
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.kept[1][name])
            super().save_pretrained(path)
            for name, parameter in self.parameters.items():
                parameter.copy_(now[name])


class StepsOfEightBits(TorchTrainEngine):
    """A checkpoint's counts of steps are kept in bfloat16."""

    def load_checkpoint(self, path):
        super().load_checkpoint(path)
        for state in self.optimizer.state.values():
            state["step"].copy_(state["step"].bfloat16())


class DivisionsLeftOut(TorchTrainEngine):
    """A micro-batch whose objective divides by zero is taken for one without a token to learn from."""

    def forward_backward(self, batch, objective):
        def kept(outputs, part):
            try:
                return objective(outputs, part)
            except ZeroDivisionError:
                return ObjectiveResult(loss=next(iter(outputs.values())).sum() * 0.0)

        kept.outputs = objective.outputs
        return super().forward_backward(batch, kept)


class WatchdogLeft(TorchTrainEngine):
    """A timer that ends an engine which hangs is called off where a pass ends well."""

    def forward_backward(self, batch, objective):
        timer = threading.Timer(20.0, lambda: None)
        timer.daemon = True
        timer.start()
        found = super().forward_backward(batch, objective)
        timer.cancel()
        timer.join()
        return found
