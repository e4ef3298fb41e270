"""Rollout engines that lose what they should keep over an interruption, or keep what they should lose."""

from __future__ import annotations

from contextlib import aclosing

import numpy as np
import torch

from broken.rollout_unseen import Patched
from rlsdk.interfaces import Box, fingerprint
from rlsdk.kit.requests import response_limit
from rlsdk.kit.sampling import mixed_seed
from rlsdk.reference.jobs import Job
from rlsdk.reference.rows import PositionedRows
from rlsdk.reference.running import Running
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


class AbortDropsNewest(Patched):
    """A sample that is aborted is given out without its newest token."""

    class RunningPart(Running):
        def abort(self):
            for row in np.flatnonzero(self.table["alive"]):
                if self._job(row).aborted and self.table["made"][row] - self.table["since"][row] > 1:
                    self.table["made"][row] -= 1
            super().abort()


class AbortEndsThePause(TransformersRolloutEngine):
    """Aborting everything also ends a pause."""

    def abort(self, request_ids=None):
        super().abort(request_ids)
        if request_ids is None:
            self.paused = False


class CallsShareNoise(TransformersRolloutEngine):
    """What is drawn without a seed follows from the number of calls that have ended."""

    async def generate(self, requests):
        try:
            async with aclosing(super().generate(requests)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self.num_ended = getattr(self, "num_ended", 0) + 1

    def _job(self, call, request, at):
        if request.sampling.seed is None:
            seed = mixed_seed(self.ctx.seed, getattr(self, "num_ended", 0), at)
            return Job(call, request, seed, response_limit(request, self.spec.max_model_tokens))
        return super()._job(call, request, at)


class WakeBringsBackWeights(TransformersRolloutEngine):
    """Whatever is woken, the weights that sleep kept come back, until all is awake."""

    def sleep(self, level=1):
        self.kept = {name: p.detach().clone() for name, p in self.parameters.items()} if level == 1 else {}
        super().sleep(level)

    def wake(self, parts=("weights", "kv_cache")):
        super().wake(parts)
        with torch.no_grad():
            for name, tensor in self.kept.items():
                self.parameters[name].data.copy_(tensor)
        if "kv_cache" in parts:
            self.kept = {}


class CacheByEmbeddings(Patched):
    """What prompts gave is kept as long as the embeddings are the same."""

    class RowsPart(PositionedRows):
        def prefill(self, prompts):
            weight = self.model.get_input_embeddings().weight
            now = fingerprint(weight, Box.whole(tuple(weight.shape)))
            if getattr(self, "made_with", None) != now:
                self.made_with, self.kept = now, {}
            key = tuple(tuple(prompt.tolist()) for prompt in prompts)
            if key not in self.kept:
                self.kept[key] = super().prefill(prompts)
            return self.kept[key]


class NormsOfOldWeights(TransformersRolloutEngine):
    """Where a norm multiplies by 1 + weight, the sum is made once and serves all later weights."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        for norm in self.model.modules():
            if type(norm).__name__ == "Gemma2RMSNorm":
                scale = 1.0 + norm.weight.detach().float()
                norm.forward = lambda x, norm=norm, scale=scale: (norm._norm(x.float()) * scale).type_as(x)


class LogitsUncapped(TransformersRolloutEngine):
    """The cap that a family puts on its logits is left out."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        if hasattr(self.model.config, "final_logit_softcapping"):
            self.model.config.final_logit_softcapping = None
