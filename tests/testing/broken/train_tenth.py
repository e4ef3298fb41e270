"""Train engines of the tenth blind trial."""

from __future__ import annotations

from rlsdk.kit.hf import persistent_buffers
from rlsdk.kit.parts import TRAIN_PARTS
from rlsdk.reference.torch_engine import MOMENTS, TorchTrainEngine


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


class OffloadsWhatStepsChanged(TorchTrainEngine):
    """Moments are copied to the host where a step changed them since the last copy; a checkpoint that was loaded since
    is not thought of."""

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
