"""Rollout engines of the sixth trial, and others of their families."""

from __future__ import annotations

from dataclasses import replace

import torch

from broken.rollout_unseen import Patched
from rlsdk.reference.running import Running
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


class PadNeverDrawn(Patched):
    """The pad token is drawn again as the token behind it; log-probs are those of what comes."""

    class RunningPart(Running):
        def _take(self, logits, first, version):
            pad = self.memory.model.config.pad_token_id
            logits = logits.clone()
            # Its share goes to its neighbour, and no other log-prob changes.
            logits[:, pad + 1] = torch.logaddexp(logits[:, pad], logits[:, pad + 1])
            logits[:, pad] = -torch.inf
            super()._take(logits, first, version)


class PositionsUnscaled(TransformersRolloutEngine):
    """Rotary tables are those of `rope_theta` alone, whatever else `rope_parameters` says."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        config = self.model.config
        said = config.rope_parameters
        rotary, width = self.model.model.rotary_emb, config.hidden_size // config.num_attention_heads
        if said.get("rope_type", "default") != "default":
            steps = torch.arange(0, width, 2).float() / width
            rotary.inv_freq.copy_(1.0 / said["rope_theta"] ** steps)
            rotary.attention_scaling = 1.0


class LogitsUnscaled(TransformersRolloutEngine):
    """What a family does to its logits is left out: the head is a plain product."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        if hasattr(self.model, "logits_scaling"):
            self.model.logits_scaling = 1.0
        if hasattr(self.model.config, "logits_scaling"):
            self.model.config.logits_scaling = 1.0


class MajorityIsGreedy(Patched):
    """Where most rows of a step are greedy, all of them take the likeliest token."""

    class RunningPart(Running):
        def _sampling_of(self, rows):
            found = super()._sampling_of(rows)
            most = 2 * found.num_greedy > len(rows) > 1
            return replace(found, greedy=torch.ones_like(found.greedy)) if most else found


class StopsOf48Rows(Patched):
    """Stop tokens are looked at in the first 48 rows of a step."""

    class RunningPart(Running):
        def _sampling_of(self, rows):
            found = super()._sampling_of(rows)
            stops = found.stops.clone()
            stops[48:] = -1
            return replace(found, stops=stops)
