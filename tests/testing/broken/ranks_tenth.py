"""Train engines of several ranks of the tenth blind trial."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rlsdk_fsdp.engine import FsdpTrainEngine


class LeastStep(FsdpTrainEngine):
    """After loading ranks agree on AdamW's count of each tensor by the least of them, where one without rows of it has
    none."""

    def load_checkpoint(self, path):
        super().load_checkpoint(path)
        if self.optimizer is None:
            return
        states = [self.optimizer.state.get(piece.held) or {} for piece in self.pieces]
        steps = torch.tensor([float(state.get("step", 0.0)) for state in states])
        dist.all_reduce(steps, dist.ReduceOp.MIN)
        for state, step in zip(states, steps.tolist(), strict=True):
            if state:
                state["step"].fill_(step)
