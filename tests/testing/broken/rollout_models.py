"""Rollout engines that are wrong for other models, dtypes or configurations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from broken.rollout_base import Patched, Rewritten
from rlsdk.interfaces import (
    GenerationOutput,
    GenerationRequest,
    RankContext,
    RolloutSpec,
    SyncReceipt,
    WeightLayout,
    WeightShard,
)
from rlsdk.kit.generation.sampling import filtered
from rlsdk.kit.model.outputs import output_logits
from rlsdk.reference import running
from rlsdk.reference.rows import PositionedRows, RowStep
from rlsdk.reference.running import Running
from rlsdk.reference.transformers_rollout import TransformersRolloutEngine


class OneRowMore(TransformersRolloutEngine):
    """One sample more than `max_running` is decoded concurrently."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        self.decoder.max_running += 1


class WiderStep(RowStep):
    """Part of another engine."""

    def visible(self, window, device):
        return super().visible(None if window is None else window + 1, device)


class WindowTooWide(Patched):
    """Decoded rows attend to one token more than the model's window."""

    class RowsPart(PositionedRows):
        def step(self, tokens, positions, *, most):
            highest = int(positions.max())
            self._reserve(self.count, highest + 1, most)
            at = torch.from_numpy(positions)
            self.now = WiderStep(at, highest + 1)
            hidden = self.backbone(
                input_ids=tokens[:, None], position_ids=at[:, None], past_key_values=self, use_cache=True,
                row_step=self.now,
            ).last_hidden_state  # fmt: skip
            return output_logits(self.model, hidden[:, 0])


class FiltersOfTheFolder(TransformersRolloutEngine):
    """If a request has no filters, those of the model's `generation_config.json` apply."""

    async def generate(self, requests):
        file = Path(self.spec.model.path) / "generation_config.json"
        fields = json.loads(file.read_text()) if file.exists() else {}
        top_k, top_p = fields.get("top_k") or 0, fields.get("top_p") or 1.0
        changed = [
            replace(one, sampling=replace(one.sampling, top_k=top_k, top_p=top_p))
            if not one.sampling.top_k and one.sampling.top_p == 1
            else one
            for one in requests
        ]
        async for output in super().generate(changed):
            yield output


class NormsOfOldWeights(TransformersRolloutEngine):
    """For norms that multiply by 1 + weight, the sum is computed once and kept for all later weights."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        for norm in self.model.modules():
            if type(norm).__name__ == "Gemma2RMSNorm":
                scale = 1.0 + norm.weight.detach().float()
                norm.forward = lambda x, norm=norm, scale=scale: (norm._norm(x.float()) * scale).type_as(x)


class LogitsUncapped(TransformersRolloutEngine):
    """The logit cap of a model family is ignored."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        if hasattr(self.model.config, "final_logit_softcapping"):
            self.model.config.final_logit_softcapping = None


class TiedUnsaid(TransformersRolloutEngine):
    """`layout` lacks the tied tensor's other name."""

    def layout(self) -> Sequence[WeightLayout]:
        return [replace(layout, tied={}) for layout in super().layout()]


class ServedAsFloat32(TransformersRolloutEngine):
    """Receipts count float32 bytes for any dtype."""

    def update_weights(self, shards: Iterable[WeightShard], version: int) -> SyncReceipt:
        receipt = super().update_weights(shards, version)
        return replace(receipt, num_bytes=sum(4 * p.numel() for p in self.parameters.values()))


class PositionsUnscaled(TransformersRolloutEngine):
    """Rotary tables use only `rope_theta` and ignore the other `rope_parameters`."""

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
    """The logit scaling of a model family is ignored."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        if hasattr(self.model, "logits_scaling"):
            self.model.logits_scaling = 1.0
        if hasattr(self.model.config, "logits_scaling"):
            self.model.config.logits_scaling = 1.0


class ChunksOf1024(Patched):
    """Prompts run in chunks of 1024 tokens, and the positions of every chunk but the first are off by one."""

    class RowsPart(PositionedRows):
        def prefill(self, prompts):
            hook = self.backbone.register_forward_pre_hook(self.shifted, with_kwargs=True)
            try:
                return super().prefill(prompts)
            finally:
                hook.remove()

        @staticmethod
        def shifted(module, args, kwargs):
            positions = kwargs["position_ids"]
            return args, {**kwargs, "position_ids": positions + positions // 1024}


class PositionsInHalf(TransformersRolloutEngine):
    """Positions have the model's dtype: in bfloat16 those above 256 are rounded."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        if self.model.dtype == torch.bfloat16:
            backbone = getattr(self.model, self.model.base_model_prefix)
            backbone.register_forward_pre_hook(self.rounded, with_kwargs=True)

    @staticmethod
    def rounded(module, args, kwargs):
        return args, {**kwargs, "position_ids": kwargs["position_ids"].to(torch.bfloat16).long()}


def drawn_in_half(logits, sampling, noise):
    log_probs = (logits.float() / sampling.temperature[:, None]).log_softmax(-1)
    sums = filtered(log_probs.exp(), sampling).to(logits.dtype).cumsum(-1).float()
    total = sums[:, -1:]
    target = torch.minimum(noise[:, :1] * total, total.nextafter(torch.zeros_like(total)))
    tokens = torch.searchsorted(sums, target, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    tokens = torch.where(sampling.greedy, logits.argmax(-1), tokens)
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0]


class SumsInHalf(Patched):
    """Tokens are drawn by a cumulative sum of probabilities in the dtype of the logits."""

    class RunningPart(Running):
        def _take(self, logits, first, version):
            before, running.draw = running.draw, drawn_in_half
            try:
                super()._take(logits, first, version)
            finally:
                running.draw = before


class CompactionKeepsSampling(Patched):
    """Sampling parameters do not move when finished rows are removed."""

    class RunningPart(Running):
        def compact(self):
            kept, before = self.sampling, len(self.table)
            super().compact()
            if len(self.table) != before:
                self.sampling = kept.select(torch.arange(len(self.table), device=self.device))


class SharesEqualHead(TransformersRolloutEngine):
    """An untied head that equals the embeddings when the model is loaded shares their memory afterwards."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, spec)
        embeddings, head = self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight
        if spec.load_weights and torch.equal(head, embeddings):
            head.data = embeddings.data


class BuffersApart(TransformersRolloutEngine):
    """Tensors of the checkpoint that the model holds as buffers are loaded into copies of them."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, spec)
        for name in {name for name, _ in self.model.named_buffers()} & set(self.parameters):
            self.parameters[name] = self.parameters[name].clone()


class NormsInHalf(TransformersRolloutEngine):
    """Norms square activations in the model's dtype instead of float32."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, spec)
        if spec.model.dtype == "float32":
            return
        for module in self.model.modules():
            if hasattr(module, "variance_epsilon"):
                module.forward = partial(_narrow_norm, module)


def _narrow_norm(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    scale: torch.Tensor = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * (hidden * scale)


class TokensOf16Bits(Rewritten):
    """Token ids are copied through 16-bit numbers."""

    def given(self, request: GenerationRequest, output: GenerationOutput) -> GenerationOutput:
        return replace(output, token_ids=output.token_ids.astype(np.uint16).astype(np.int64))


class ExpertsAlwaysNormalised(TransformersRolloutEngine):
    """The weights of the chosen experts are divided by their sum, even if the configuration says otherwise."""

    def initialize(self, ctx: RankContext, spec: RolloutSpec) -> None:
        super().initialize(ctx, spec)
        for module in self.model.modules():
            if hasattr(module, "norm_topk_prob"):
                module.norm_topk_prob = True
