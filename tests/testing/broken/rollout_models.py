"""Rollout engines that are wrong for other models, dtypes or configurations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from broken.defect import defect
from broken.rollout_base import Rewritten
from rlsdk.interfaces import (
    GenerationOutput,
    GenerationRequest,
    RankContext,
    RolloutSpec,
    SyncReceipt,
    WeightLayout,
    WeightShard,
)
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


@defect({"model.capped": "wrong samples, capped logits"})
class LogitsUncapped(TransformersRolloutEngine):
    """The logit cap of a model family is ignored."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        if hasattr(self.model.config, "final_logit_softcapping"):
            self.model.config.final_logit_softcapping = None


@defect({"model.tied": "other names of the tied tensor"})
class TiedUnsaid(TransformersRolloutEngine):
    """`layout` lacks the tied tensor's other name."""

    def layout(self) -> Sequence[WeightLayout]:
        return [replace(layout, tied={}) for layout in super().layout()]


@defect({"model.tied": "bytes"})
class ServedAsFloat32(TransformersRolloutEngine):
    """Receipts count float32 bytes for any dtype."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_weights(shards, version)
        return replace(receipt, num_bytes=sum(4 * p.numel() for p in self.parameters.values()))


@defect({"model.scaled": "wrong samples, scaled"})
class LogitsUnscaled(TransformersRolloutEngine):
    """The logit scaling of a model family is ignored."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        if hasattr(self.model, "logits_scaling"):
            self.model.logits_scaling = 1.0
        if hasattr(self.model.config, "logits_scaling"):
            self.model.config.logits_scaling = 1.0


@defect({"model.configuration": "wrong samples after an update, sliding windows"})
class SharesEqualHead(TransformersRolloutEngine):
    """An untied head that equals the embeddings when the model is loaded shares their memory afterwards."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, spec)
        embeddings, head = self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight
        if spec.load_weights and torch.equal(head, embeddings):
            head.data = embeddings.data


@defect({"model.experts": "other biases"})
class BuffersApart(TransformersRolloutEngine):
    """Tensors of the checkpoint that the model holds as buffers are loaded into copies of them."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, spec)
        for name in {name for name, _ in self.model.named_buffers()} & set(self.parameters):
            self.parameters[name] = self.parameters[name].clone()


@defect({"model.float16": "version 0"})
class TokensOf16Bits(Rewritten):
    """Token ids are copied through 16-bit numbers."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        return replace(output, token_ids=output.token_ids.astype(np.uint16).astype(np.int64))


@defect({"model.experts": "glm4_moe, the first weights"})
class ExpertsAlwaysNormalised(TransformersRolloutEngine):
    """The weights of the chosen experts are divided by their sum, even if the configuration says otherwise."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, spec)
        for module in self.model.modules():
            if hasattr(module, "norm_topk_prob"):
                module.norm_topk_prob = True
