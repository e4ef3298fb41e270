"""Train engines of several ranks of the third trial."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm

from rlsdk.interfaces import OptimStepResult
from rlsdk.kit.optim import learning_rate, set_learning_rate
from rlsdk_fsdp.engine import FsdpTrainEngine


class EachRankSkipsByItself(FsdpTrainEngine):
    """A step is skipped per rank, by its own shards."""

    def optim_step(self):
        optimizer, spec = self._trained()
        lr = learning_rate(self.num_steps, spec)
        for piece in self.pieces:
            piece.take_gradient()
        mine = get_total_norm([p.held.grad for p in self.pieces if p.held.grad is not None and p.box.numel])
        finite = math.isfinite(float(mine))
        norm = self._clip(spec.max_grad_norm)
        if finite:
            set_learning_rate(optimizer, lr)
            optimizer.step()
            self.num_steps += 1
        self._drop_gradients()
        return OptimStepResult(grad_norm=norm, lr=lr, skipped=not finite)


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
