"""Train engines of several ranks of the third trial."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from rlsdk_fsdp.engine import FsdpTrainEngine


class RandomStateOfRankZero(FsdpTrainEngine):
    """After loading all ranks have rank 0's random state."""

    def load_checkpoint(self, path):
        super().load_checkpoint(path)
        state = torch.get_rng_state()
        dist.broadcast(state, 0)
        torch.set_rng_state(state)


class SeedOfTheWorld(FsdpTrainEngine):
    """Random initial weights depend on the number of ranks."""

    def initialize(self, ctx, spec):
        super().initialize(replace(ctx, seed=ctx.seed + ctx.world_size - 1), spec)


class IdleRankDrops(FsdpTrainEngine):
    """A rank that has no rows in a step's second call drops its part of the first call's gradient."""

    has_called = False

    def forward_backward(self, batch, objective):
        result = super().forward_backward(batch, objective)
        if self.has_called and batch.num_rows == 0:
            for parameter in self.model.parameters():
                parameter.grad = None if parameter.grad is None else parameter.grad * 0
        self.has_called = True
        return result

    def optim_step(self):
        self.has_called = False
        return super().optim_step()
