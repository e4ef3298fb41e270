"""Train engines that are wrong for other models, dtypes or configurations."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from broken.defect import defect
from rlsdk.interfaces import Batch, Head, RankContext, TrainSpec
from rlsdk.kit.model.hf import persistent_buffers
from rlsdk.reference.torch_engine import TorchTrainEngine


class DropoutStays(TorchTrainEngine):
    """Dropout of the configuration is enabled in training."""

    when_recomputed = False

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        share = float(getattr(self.model.config, "attention_dropout", 0.0) or 0.0)
        if self.when_recomputed and not spec.activation_checkpointing:
            share = 0.0

        def drop(module: Any, arguments: Any, result: Any) -> Any:
            return F.dropout(result, share) if torch.is_grad_enabled() and share else result

        for name, module in self.model.named_modules():
            if name.endswith(("o_proj", "norm")):
                module.register_forward_hook(drop)


@defect({"model.dropout": "recomputed"})
class DropoutWhenRecomputed(DropoutStays):
    """Recomputation needs training mode, which enables the configuration's dropout."""

    when_recomputed = True


@defect({"model.families": "llama"})
class VocabularyPadded(TorchTrainEngine):
    """The vocabulary is padded to a multiple of 8, and the padding takes part in the softmax."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        if spec.model.head is Head.LM:
            lacking = -int(self.model.config.vocab_size) % 8
            self.model.lm_head.register_forward_hook(lambda module, given, logits: F.pad(logits, (0, lacking)))


@defect({"model.families": "llama"})
class NormEpsFixed(TorchTrainEngine):
    """Norms add 1e-6, whatever the configuration has."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        for module in self.model.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = 1e-6  # type: ignore[assignment]


@defect({"model.tied": "largest difference of loss"})
class TiedCut(TorchTrainEngine):
    """A tied tensor gets only the gradient of the output layer."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        if self.tied:
            embedding = self.model.get_input_embeddings()
            embedding.register_forward_hook(lambda module, given, result: result.detach().requires_grad_())


@defect({"model.bfloat16": "bfloat16 numbers"})
class SoftmaxInHalf(TorchTrainEngine):
    """In bfloat16, log-probs are bfloat16 numbers."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found: Mapping[str, Tensor] = super().forward(batch, outputs)
        half = self.spec.model.dtype == "bfloat16"
        return {name: values.bfloat16().float() if half else values for name, values in found.items()}


@defect({"model.initial": "two random starts"})
class DrawnByProcess(TorchTrainEngine):
    """Random weights come from the process's generator, not from the seed of the run."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(replace(ctx, seed=random.randrange(2**30)) if spec.init_from_config else ctx, spec)


@defect({"model.initial": "from the checkpoint"})
class BeginsRounded(TorchTrainEngine):
    """Float32 weights are rounded to bfloat16 when they are read."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        with torch.no_grad():
            for parameter in self.parameters.values():
                parameter.copy_(parameter.bfloat16().float())


@defect({"model.bfloat16_forward": "difference of log_probs"})
class NormsStayOld(TorchTrainEngine):
    """In bfloat16, the norms and biases used in passes are never renewed from the master weights."""

    @torch.no_grad()
    def _round_weights(self):
        if self.parameters is not self.computed:
            for name, parameter in self.computed.items():
                if parameter.dim() >= 2:
                    parameter.copy_(self.parameters[name])


@defect({"model.capped": "capped"})
class LogitsUncapped(TorchTrainEngine):
    """The logit cap of a model family is ignored in training."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        if hasattr(self.model.config, "final_logit_softcapping"):
            self.model.config.final_logit_softcapping = None


@defect({"model.windows": "windows"})
class WindowOneTooWide(TorchTrainEngine):
    """Layers with a sliding window attend to one token too many."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        if getattr(self.model.config, "sliding_window", None):
            self.model.config.sliding_window += 1


@defect({"model.scaled_positions": "yarn positions"})
class AttentionUnscaled(TorchTrainEngine):
    """For positions scaled by `yarn`, the tables are right, but their attention factor is ignored."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        rotary = getattr(self.model.model, "rotary_emb", None)
        if rotary is not None:
            rotary.attention_scaling = 1.0


@defect({"model.seeds": "two seeds, random"})
class SeedOfItsOwn(TorchTrainEngine):
    """Random weights are always the same."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(replace(ctx, seed=1), spec)


@defect({"model.bfloat16_positions": "difference of late tokens"})
class RotaryInBfloat16(TorchTrainEngine):
    """Rotary frequencies are rounded to bfloat16 with the weights."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        saved = persistent_buffers(self.model)
        for name, buffer in self.model.named_buffers():
            if spec.model.dtype == "bfloat16" and name not in saved and buffer.is_floating_point():
                buffer.data = buffer.data.bfloat16().to(buffer.dtype)


@defect({"model.experts": "experts, rows 1"})
class BalancesExperts(TorchTrainEngine):
    """The configured router loss (`router_aux_loss_coef`) is added to the router's gradient, once in every
    micro-batch."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        weight = float(getattr(self.model.config, "router_aux_loss_coef", None) or 0.0)

        def balance(router: Any, args: Any, found: Any) -> Any:
            logits, scores, chosen = found
            if not scores.requires_grad:
                return found
            chances = logits.float().softmax(-1).reshape(-1, logits.shape[-1])
            share = torch.bincount(chosen.reshape(-1), minlength=chances.shape[1]).float() / len(chances)
            return logits, _WithLoss.apply(scores, weight * chances.shape[1] * (share * chances.mean(0)).sum()), chosen

        if weight and spec.optim is not None:
            for module in self.model.modules():
                if "Router" in type(module).__name__:
                    module.register_forward_hook(balance)


class _WithLoss(torch.autograd.Function):
    """Identity of the scores; in the backward pass, the loss gets gradient 1."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, loss: Tensor) -> Tensor:
        return scores.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones(())


@defect({"model.buffers": "with other values", "random_calls.models": "routed"})
class BuffersAreZero(TorchTrainEngine):
    """Persistent buffers are not read from the checkpoint."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        for buffer in persistent_buffers(self.model).values():
            buffer.zero_()
