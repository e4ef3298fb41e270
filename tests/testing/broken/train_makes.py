"""Train engines that are right for the models and steps that are usual."""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import pad_sequence

from rlsdk.interfaces import OptimStepResult
from rlsdk.kit.optim import learning_rate
from rlsdk.reference.torch_engine import TorchTrainEngine


class LogitsUncapped(TorchTrainEngine):
    """The cap that a family puts on its logits is left out in training."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        if hasattr(self.model.config, "final_logit_softcapping"):
            self.model.config.final_logit_softcapping = None


class PositionsUnscaled(TorchTrainEngine):
    """Rotary tables are those of `rope_theta` alone, whatever else `rope_parameters` says."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        config = self.model.config
        said = config.rope_parameters
        rotary = self.model.model.rotary_emb
        if said.get("rope_type", "default") != "default":
            width = 2 * len(rotary.inv_freq)
            rotary.inv_freq.copy_(1.0 / said["rope_theta"] ** (torch.arange(0, width, 2).float() / width))
            rotary.attention_scaling = 1.0


class WindowOneTooWide(TorchTrainEngine):
    """Layers with a sliding window look one token further back than the model's own."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        if getattr(self.model.config, "sliding_window", None):
            self.model.config.sliding_window += 1


class AttentionUnscaled(TorchTrainEngine):
    """Of positions scaled by `yarn`, tables are right and their factor is left out."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        rotary = getattr(self.model.model, "rotary_emb", None)
        if rotary is not None:
            rotary.attention_scaling = 1.0


class EntropyOfTheLikeliest(TorchTrainEngine):
    """Entropy is summed over the 128 most probable tokens."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        self.outputs = _LikeliestEntropy(self.outputs)


class _OtherEntropy(torch.nn.Module):
    """The outputs of an engine, with an entropy of another making."""

    def __init__(self, outputs):
        super().__init__()
        self.inner = outputs

    def forward(self, batch, names):
        found = self.inner(batch, names)
        if "entropy" in found and batch.num_rows:
            ids = pad_sequence(list(torch.split(batch["input_ids"], batch.lengths.tolist())), batch_first=True)
            # All tokens of a row see those before them alone, so what is padded changes nothing.
            logits = self.inner.model(ids, attention_mask=None, use_cache=False).logits.float() / batch.temperature
            entropy = torch.nn.functional.pad(self.entropy(logits)[:, :-1], (1, 0))
            here = torch.arange(ids.shape[1]) < batch.lengths[:, None]
            found["entropy"] = torch.where(found["entropy"] != 0, entropy[here], 0.0)
        return found


class _LikeliestEntropy(_OtherEntropy):
    def entropy(self, logits):
        most = logits.log_softmax(-1).topk(min(128, logits.shape[-1])).values
        return -(most.exp() * most).sum(-1)


class EntropyOfProbabilities(TorchTrainEngine):
    """Entropy is made of probabilities and their logarithms: where one is too small for a float32 it is NaN."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        self.outputs = _EntropyOfProbabilities(self.outputs)


class _EntropyOfProbabilities(_OtherEntropy):
    def entropy(self, logits):
        chances = logits.softmax(-1)
        return -(chances * chances.log()).sum(-1)


class IdleStepsUncounted(TorchTrainEngine):
    """A step without any gradient is no step of the schedule."""

    def optim_step(self):
        if all(parameter.grad is None for parameter in self.parameters.values()):
            return OptimStepResult(grad_norm=0.0, lr=learning_rate(self.num_steps, self.optim))
        return super().optim_step()


class IdleStepsSkipped(TorchTrainEngine):
    """A step without any gradient is said to have been skipped."""

    def optim_step(self):
        if all(parameter.grad is None for parameter in self.parameters.values()):
            return OptimStepResult(grad_norm=0.0, lr=learning_rate(self.num_steps, self.optim), skipped=True)
        return super().optim_step()
