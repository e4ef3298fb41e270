"""Train engines with wrong outputs without gradient: log-probs, entropy, values, scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from broken.train_base import Wrapped
from rlsdk.interfaces import Batch, ForwardBackwardResult, Head, Objective, OptimStepResult, RankContext, TrainSpec
from rlsdk.reference.torch_engine import TorchTrainEngine


class BeforeTemperature(TorchTrainEngine):
    """Log-probs are of the logits before the division by the temperature."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        return super().forward(batch if "entropy" in outputs else batch.with_meta(temperature=1.0), outputs)


class EntropyInBits(TorchTrainEngine):
    """Entropy without gradient uses the logarithm to base 2."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = super().forward(batch, outputs)
        return {name: values * 1.4427 if name == "entropy" else values for name, values in found.items()}


class ValuesOneLate(TorchTrainEngine):
    """Without gradient, the value at t is the head's output at t instead of t - 1."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = super().forward(batch, outputs)
        return {name: values.roll(-1) if name == "values" else values for name, values in found.items()}


class ScoresAbsent(TorchTrainEngine):
    """Claims score models, but returns zeros."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = super().forward(batch, outputs)
        return {name: values * 0 if name == "scores" else values for name, values in found.items()}


def early(batch: Batch) -> Batch:
    if "response_mask" not in batch:
        return batch
    return batch.with_tokens(response_mask=batch["response_mask"].roll(-1))


class MaskOneEarly(TorchTrainEngine):
    """The response mask is applied to the predicting position: off by one."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        return super().forward(early(batch), outputs)

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        return super().forward_backward(early(batch), objective)


class RowsSorted(TorchTrainEngine):
    """Outputs are in the order in which rows ran: by length."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = super().forward(batch, outputs)
        if self.spec.micro_batch_rows is None or batch.num_rows == 0:
            return found
        at = batch.token_index(batch.lengths.argsort(stable=True))
        return {name: values[at] for name, values in found.items()}


class NoRowsFail(TorchTrainEngine):
    """A rank without rows raises an error."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        if batch.num_rows == 0:
            raise IndexError("list index out of range")
        return super().forward(batch, outputs)


class PadsInSecret(TorchTrainEngine):
    """Claims packing, but runs padded rectangles."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        outputs = self.outputs

        def padded(batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
            found: dict[str, Tensor] = outputs(batch, names, False)
            return found

        self.outputs = padded  # type: ignore[assignment]


class FrozenInHalf(TorchTrainEngine):
    """A frozen model is stored in bfloat16, whatever dtype was requested."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        if spec.optim is None:
            for parameter in self.parameters.values():
                parameter.data = parameter.data.bfloat16().float()


class PositionsWrap(TorchTrainEngine):
    """Positions start again at 256, the length of a rotary table."""

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
    """If a row is longer than 128 tokens, attention crosses the borders of packed rows."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        if batch.num_rows < 2 or int(batch.lengths.max()) <= 128 or "scores" in names:
            return super().run(batch, names)
        together = Batch(lengths=batch.lengths.sum()[None], tokens=batch.tokens, rows={}, meta=batch.meta)
        begins = batch.position_ids > 0
        return {name: values * begins for name, values in super().run(together, names).items()}


class EndsAfterThousand(Wrapped):
    """Outputs are computed only for the first 1,024 tokens of a pass, the size of a buffer."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        early = torch.arange(batch.num_tokens) < 1024
        found = super().run(batch, names)
        return {name: values if name == "scores" else values * early for name, values in found.items()}


class BudgetDoubled(TorchTrainEngine):
    """A pass may have twice as many tokens as allowed."""

    def _cut(self, batch: Batch, objective: Objective | None = None) -> list[Tensor]:
        limits = self.spec
        self.spec = replace(limits, micro_batch_tokens=limits.micro_batch_tokens and limits.micro_batch_tokens * 2)
        try:
            return super()._cut(batch, objective)
        finally:
            self.spec = limits


class ForwardWithoutBudget(TorchTrainEngine):
    """Passes without gradient run all rows in one pass."""

    def _cut(self, batch: Batch, objective: Objective | None = None) -> list[Tensor]:
        return (
            [torch.arange(batch.num_rows)] if objective is None and batch.num_rows else super()._cut(batch, objective)
        )


class LongRowsCut(TorchTrainEngine):
    """A row that is longer than the limit of a pass is truncated."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found, limit = super().forward(batch, outputs), self.spec.micro_batch_tokens
        seen = batch.position_ids < (limit or 10**9)
        return {name: values if name == "scores" else values * seen for name, values in found.items()}


class OneTokenRowsFail(Wrapped):
    """A row of one token raises an error, because it has nothing to predict."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        if batch.num_rows and int(batch.lengths.max()) == 1:
            raise IndexError("list index out of range")
        return super().run(batch, names)


class ValuesMasked(Wrapped):
    """The response mask is applied to values too."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        if "values" in found and "response_mask" in batch:
            found["values"] = found["values"] * batch["response_mask"]
        return found


class ScoresInOrderOfLength(TorchTrainEngine):
    """If rows run in several passes, scores are in the order in which they ran."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found, cut = super().forward(batch, outputs), self._cut(batch)
        return {name: values[torch.cat(cut)] if name == "scores" and cut else values for name, values in found.items()}


class EntropyAtOne(Wrapped):
    """If log-probs and entropy are requested together, the entropy is that of temperature 1."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        if len(names) > 1:
            found |= super().run(batch.with_meta(temperature=1.0), ("entropy",))
        return found


class CachedByRow(TorchTrainEngine):
    """Log-probs of rows are cached by their identity, even across steps."""

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


class FrozenAtOne(TorchTrainEngine):
    """A frozen model ignores the temperature."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        return super().forward(batch.with_meta(temperature=1.0) if self.optim is None else batch, outputs)


class MoreThanAsked(TorchTrainEngine):
    """Returns log-probs whatever is requested."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        names = outputs if self.spec.model.head is not Head.LM or "log_probs" in outputs else ("log_probs", *outputs)
        return super().forward(batch, names)


class RowsByNumber(TorchTrainEngine):
    """A row's identity is used as its position in the batch."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        order = batch["row_id"].argsort()
        found = super().forward(batch, outputs)
        if "scores" in outputs or bool((order == torch.arange(batch.num_rows)).all()):
            return found
        at = batch.token_index(order)
        return {name: values[at] for name, values in found.items()}


class _OtherEntropy(torch.nn.Module):
    """The outputs of an engine, with another computation of the entropy."""

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


class EntropyOfTopTokens(TorchTrainEngine):
    """Entropy is summed over the 128 most probable tokens."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        self.outputs = _LikeliestEntropy(self.outputs)


class _EntropyOfProbabilities(_OtherEntropy):
    def entropy(self, logits):
        chances = logits.softmax(-1)
        return -(chances * chances.log()).sum(-1)


class EntropyOfProbabilities(TorchTrainEngine):
    """Entropy is computed from probabilities and their logarithms: NaN if a probability underflows in float32."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        self.outputs = _EntropyOfProbabilities(self.outputs)


class LossIsATensor(TorchTrainEngine):
    """Fields of results are tensors."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        return replace(result, loss=torch.tensor(result.loss))  # type: ignore[arg-type]


class MasksInPlace(TorchTrainEngine):
    """Tokens outside the mask are zeroed in the batch itself."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = super().forward(batch, outputs)
        if "advantages" in batch:
            batch["advantages"].mul_(0)
        return found


class OutputsWithMore(TorchTrainEngine):
    """Entropy is always returned, requested or not."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = super().forward(batch, outputs)
        return found | ({"entropy": torch.zeros(batch.num_tokens)} if "log_probs" in outputs else {})


class MaskedIsAll(TorchTrainEngine):
    """A mask without any token is treated as no mask."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        mask = batch.tokens.get("response_mask")
        if mask is not None and not bool(mask.any()):
            batch = replace(batch, tokens={n: t for n, t in batch.tokens.items() if n != "response_mask"})
        return super().forward(batch, outputs)


class ScoredBeforePads(TorchTrainEngine):
    """Scores are read at the last token that is not padding, even if a row ends with the padding token."""

    def forward(self, batch, outputs):
        if "scores" not in outputs:
            return super().forward(batch, outputs)
        rows = [ids.tolist() for ids in batch["input_ids"].split(batch.lengths.tolist())]
        for ids in rows:
            while len(ids) > 1 and ids[-1] == self.model.config.pad_token_id:
                ids.pop()
        return super().forward(replace(Batch.from_rows(rows), meta=batch.meta), outputs)


class LogProbsClamped(Wrapped):
    """Log-probs are clamped to at least -15."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        return {n: values.clamp(min=-15.0) if n == "log_probs" else values for n, values in found.items()}


class SharesPrefixes(Wrapped):
    """Rows of one length with the same first eight tokens run once, as samples of one prompt."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        rows = torch.split(batch["input_ids"], batch.lengths.tolist())
        first: dict[Any, int] = {}
        same = [
            first.setdefault((tuple(r[:8].tolist()), len(r)), at) if len(r) > 8 else at for at, r in enumerate(rows)
        ]
        if same == list(range(len(rows))) or "scores" in names:
            return super().run(batch, names)
        found = super().run(batch, names)
        index = batch.token_index(torch.tensor(same))
        return {name: values[index] for name, values in found.items()}


class EndTokenEnds(Wrapped):
    """Tokens after an end-of-sequence token in a row are treated as padding."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        ended = (batch["input_ids"] == self.model.config.eos_token_id).cumsum(0)
        before = torch.cat([ended.new_zeros(1), ended])[:-1]
        inside = before - torch.repeat_interleave(before[batch.offsets[:-1].clamp(max=len(before) - 1)], batch.lengths)
        return {name: v if name == "scores" else v * (inside == 0) for name, v in found.items()}


class SmallRowNumbers(Wrapped):
    """Packed rows are distinguished by eight bits."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        if batch.num_rows > 128 and "scores" not in names:
            late = batch.row_of_token >= 128
            found = {name: torch.where(late, values * 0.9, values) for name, values in found.items()}
        return found


class TuplesOnly(TorchTrainEngine):
    """Requested outputs that are given as a list are not recognised."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        return super().forward(batch, outputs) if isinstance(outputs, tuple) else {}


class LastOfLongUnread(Wrapped):
    """The last token of a row of more than 300 has a log-prob of 0."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        long = torch.repeat_interleave(batch.lengths > 300, batch.lengths)
        last = torch.zeros(batch.num_tokens, dtype=torch.bool)
        last[batch.offsets[1:] - 1] = True
        return {n: torch.where(long & last, 0.0, v) if n == "log_probs" else v for n, v in found.items()}


class ForwardInHalf(TorchTrainEngine):
    """Outputs without gradient are bfloat16."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        return {name: values.bfloat16() for name, values in super().forward(batch, outputs).items()}


class ForwardNotSoCold(Wrapped):
    """Passes without gradient use a temperature of at least 0.5."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        temperature = batch.meta.get("temperature", 1.0)
        if not torch.is_grad_enabled() and temperature < 0.5:
            batch = batch.with_meta(temperature=0.5)
        return super().run(batch, names)


class RemembersOutputs(TorchTrainEngine):
    """A frozen model caches outputs by tokens, but not by temperature."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        self.known: dict[Any, dict[str, Tensor]] = {}

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        if self.spec.optim is not None:
            return super().forward(batch, outputs)
        mask = batch["response_mask"].tolist() if "response_mask" in batch else ()
        key = (*outputs, *batch.lengths.tolist(), *batch["input_ids"].tolist(), *mask)
        if key not in self.known:
            self.known[key] = super().forward(batch, outputs)
        return {name: values.clone() for name, values in self.known[key].items()}


class TwinsShareAMask(TorchTrainEngine):
    """Rows with the same tokens are computed once, with the first one's response mask."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        rows = [tuple(row.tolist()) for row in batch["input_ids"].split(batch.lengths.tolist())]
        first = {row: at for at, row in reversed(list(enumerate(rows)))}
        found = super().forward(batch, outputs)
        chosen = [first[row] for row in rows]
        tokens = batch.token_index(torch.tensor(chosen, dtype=torch.int64))
        return {name: values[chosen] if name == "scores" else values[tokens] for name, values in found.items()}


class LendsItsCache(TorchTrainEngine):
    """Outputs of equal batches between two steps are computed once, and every caller gets the same tensors."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        self.cached: dict[Any, dict[str, Tensor]] = {}

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        fields = {**batch.tokens, "lengths": batch.lengths}
        key = (*outputs, batch.temperature, *((name, tuple(t.flatten().tolist())) for name, t in fields.items()))
        if key not in self.cached:
            self.cached[key] = super().forward(batch, outputs)
        return self.cached[key]

    def optim_step(self) -> OptimStepResult:
        self.cached.clear()
        return super().optim_step()

    def load_checkpoint(self, path: Path) -> None:
        self.cached.clear()
        super().load_checkpoint(path)


class LastPositionUnread(Wrapped):
    """The last token of a row with as many tokens as the model has positions is cut off."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        most = self.model.config.max_position_embeddings
        cut = batch.position_ids == most - 1
        found = super().run(batch, names)
        return {name: values if name == "scores" else values.masked_fill(cut, 0.0) for name, values in found.items()}


class LengthsOfEightBits(TorchTrainEngine):
    """Lengths are cut into passes as numbers of eight bits: a row of 257 tokens counts as one."""

    def _cut(self, batch: Batch, objective: Objective | None = None) -> list[Tensor]:
        return super()._cut(replace(batch, lengths=batch.lengths % 256) if self.spec.micro_batch_tokens else batch)
