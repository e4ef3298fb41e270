"""Train engines whose outputs are wrong: at lengths, settings and models other than those of a first test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlsdk.interfaces import Batch, Head, Objective, RankContext, TrainSpec
from rlsdk.reference.torch_engine import TorchTrainEngine


class Wrapped(TorchTrainEngine):
    """Base: passes go through `run`, with gradient and without."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        self.plain = self.outputs
        self.outputs = lambda batch, names: self.run(batch, names)  # type: ignore[assignment]

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.plain(batch, names)
        return found


class PositionsWrap(TorchTrainEngine):
    """Positions begin again at 256: a table of rotary angles is no longer."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)

        def wrap(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            values = [*arguments, *named.values()]
            wrapped = [v % 256 if isinstance(v, Tensor) and v.dtype is torch.int64 else v for v in values]
            return tuple(wrapped[: len(arguments)]), dict(zip(named, wrapped[len(arguments) :], strict=True))

        rotary = self.model.model.rotary_emb if spec.model.head is Head.LM else None
        if rotary is not None:
            rotary.register_forward_pre_hook(wrap, with_kwargs=True)


class RowsMeet(Wrapped):
    """Where a row is longer than 128 tokens, attention sees across the borders of packed rows."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        if batch.num_rows < 2 or int(batch.lengths.max()) <= 128 or "scores" in names:
            return super().run(batch, names)
        together = Batch(lengths=batch.lengths.sum()[None], tokens=batch.tokens, rows={}, meta=batch.meta)
        begins = batch.position_ids > 0
        return {name: values * begins for name, values in super().run(together, names).items()}


class EndsAfterThousand(Wrapped):
    """Outputs are made for the first 1,024 tokens of a pass: a buffer has that size."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        early = torch.arange(batch.num_tokens) < 1024
        found = super().run(batch, names)
        return {name: values if name == "scores" else values * early for name, values in found.items()}


class BudgetDoubled(TorchTrainEngine):
    """A pass may take twice as many tokens as it is allowed."""

    def _cut(self, batch: Batch, objective: Objective | None = None) -> list[Tensor]:
        limits = self.spec
        self.spec = replace(limits, micro_batch_tokens=limits.micro_batch_tokens and limits.micro_batch_tokens * 2)
        try:
            return super()._cut(batch, objective)
        finally:
            self.spec = limits


class ForwardWithoutBudget(TorchTrainEngine):
    """Passes without gradient take all rows at once."""

    def _cut(self, batch: Batch, objective: Objective | None = None) -> list[Tensor]:
        return (
            [torch.arange(batch.num_rows)] if objective is None and batch.num_rows else super()._cut(batch, objective)
        )


class LongRowsCut(TorchTrainEngine):
    """A row that is longer than the limit of a pass is cut at it."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found, limit = super().forward(batch, outputs), self.spec.micro_batch_tokens
        seen = batch.position_ids < (limit or 10**9)
        return {name: values if name == "scores" else values * seen for name, values in found.items()}


class OneTokenRowsFail(Wrapped):
    """A row of one token has nothing to predict, and is an error."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        if batch.num_rows and int(batch.lengths.max()) == 1:
            raise IndexError("list index out of range")
        return super().run(batch, names)


class ValuesMasked(Wrapped):
    """The response mask is laid over values, too."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        if "values" in found and "response_mask" in batch:
            found["values"] = found["values"] * batch["response_mask"]
        return found


class ScoresInOrderOfLength(TorchTrainEngine):
    """Of rows that are run in several passes, scores come in the order in which they were run."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found, cut = super().forward(batch, outputs), self._cut(batch)
        return {name: values[torch.cat(cut)] if name == "scores" and cut else values for name, values in found.items()}


class EntropyAtOne(Wrapped):
    """Asked for log-probs and entropy at once, the entropy is that of temperature 1."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        if len(names) > 1:
            found |= super().run(batch.with_meta(temperature=1.0), ("entropy",))
        return found


class LastNameOnly(Wrapped):
    """Of several outputs, each gets what the last name gives."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        return dict.fromkeys(names, found[names[-1]])


class CachedByRow(TorchTrainEngine):
    """Log-probs of rows that were seen are kept by their identity, over steps as well."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        key = (tuple(batch["row_id"].tolist()), tuple(outputs), batch.num_tokens)
        known: dict[Any, dict[str, Tensor]] = vars(self).setdefault("known", {})
        if key not in known:
            known[key] = super().forward(batch, outputs)
        return known[key]


class BufferReused(TorchTrainEngine):
    """Outputs of every call are views of one buffer."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = super().forward(batch, outputs)
        buffer = vars(self).setdefault("buffer", torch.zeros(4096))
        for name, values in found.items():
            buffer[: len(values)] = values
            found[name] = buffer[: len(values)]
        return found


class DropoutStays(TorchTrainEngine):
    """Dropout of the configuration is in force while gradients are made."""

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


class DropoutWhenRecomputed(DropoutStays):
    """Recomputation needs training mode, which turns the configuration's dropout on."""

    when_recomputed = True


class VocabularyPadded(TorchTrainEngine):
    """The vocabulary is filled up to a multiple of 8, and what was filled in takes part in the softmax."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        if spec.model.head is Head.LM:
            lacking = -int(self.model.config.vocab_size) % 8
            self.model.lm_head.register_forward_hook(lambda module, given, logits: F.pad(logits, (0, lacking)))


class NormEpsFixed(TorchTrainEngine):
    """Norms add 1e-6, whatever the configuration says."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        for module in self.model.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = 1e-6  # type: ignore[assignment]


class TiedCut(TorchTrainEngine):
    """A tied model's gradient is that of its output layer alone."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        if self.tied:
            embedding = self.model.get_input_embeddings()
            embedding.register_forward_hook(lambda module, given, result: result.detach().requires_grad_())


class TiedParted(TorchTrainEngine):
    """A tied model is trained as one whose output layer is its own."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        if self.tied and spec.optim is not None:
            self.model.lm_head.weight = torch.nn.Parameter(self.model.lm_head.weight.detach().clone())
            self.parameters["lm_head.weight"] = self.model.lm_head.weight
            self.tied = {}
            self.reset_optimizer(spec.optim)


class FrozenAtOne(TorchTrainEngine):
    """A frozen model ignores the temperature."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        return super().forward(batch.with_meta(temperature=1.0) if self.optim is None else batch, outputs)


class MoreThanAsked(TorchTrainEngine):
    """Gives log-probs whatever is asked for."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        names = outputs if self.spec.model.head is not Head.LM or "log_probs" in outputs else ("log_probs", *outputs)
        return super().forward(batch, names)


class SoftmaxInHalf(TorchTrainEngine):
    """In bfloat16, log-probs are bfloat16 numbers."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found: Mapping[str, Tensor] = super().forward(batch, outputs)
        half = self.spec.model.dtype == "bfloat16"
        return {name: values.bfloat16().float() if half else values for name, values in found.items()}
