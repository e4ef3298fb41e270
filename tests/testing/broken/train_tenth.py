"""Train engines of the tenth blind trial."""

from __future__ import annotations

from rlsdk.kit.hf import persistent_buffers
from rlsdk.reference.torch_engine import TorchTrainEngine


class ScheduleFromAdam(TorchTrainEngine):
    """A checkpoint's schedule goes on from AdamW's own count, which steps without a gradient do not move."""

    def load_checkpoint(self, path):
        super().load_checkpoint(path)
        if steps := [int(state["step"]) for _, state in self._moments()]:
            self.num_steps = max(steps)


class RotaryInBfloat16(TorchTrainEngine):
    """With the weights, rotary frequencies are rounded to bfloat16."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        saved = persistent_buffers(self.model)
        for name, buffer in self.model.named_buffers():
            if spec.model.dtype == "bfloat16" and name not in saved and buffer.is_floating_point():
                buffer.data = buffer.data.bfloat16().to(buffer.dtype)
