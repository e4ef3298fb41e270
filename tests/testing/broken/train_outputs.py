"""Train engines with wrong outputs without gradient: log-probs, entropy, values, scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from broken.defect import defect
from broken.train_base import OtherPasses, Wrapped
from rlsdk.interfaces import Batch, ForwardBackwardResult, Head, Objective, RankContext, TrainSpec
from rlsdk.reference.torch_engine import TorchTrainEngine


@defect({"outputs.temperature": "temperature 0.6"})
class BeforeTemperature(TorchTrainEngine):
    """Log-probs are of the logits before the division by the temperature."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        return super().forward(batch if "entropy" in outputs else batch.with_meta(temperature=1.0), outputs)


@defect({"outputs.entropy": "largest difference of entropy"})
class EntropyInBits(TorchTrainEngine):
    """Entropy without gradient uses the logarithm to base 2."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = super().forward(batch, outputs)
        return {name: values * 1.4427 if name == "entropy" else values for name, values in found.items()}


@defect({"outputs.values": "largest difference of values"})
class ValuesOneLate(TorchTrainEngine):
    """Without gradient, the value at t is the head's output at t instead of t - 1."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = super().forward(batch, outputs)
        return {name: values.roll(-1) if name == "values" else values for name, values in found.items()}


@defect({"outputs.scores": "largest difference of scores"})
class ScoresAbsent(TorchTrainEngine):
    """Claims score models, but returns zeros."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = super().forward(batch, outputs)
        return {name: values * 0 if name == "scores" else values for name, values in found.items()}


@defect({"distillation.hidden_states": "largest difference of hidden states"})
class HiddenStatesOneLate(TorchTrainEngine):
    """Hidden states at t are those after token t instead of those that predict it."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = super().forward(batch, outputs)
        return {name: values.roll(-1, 0) if name == "hidden_states" else values for name, values in found.items()}


@defect({"distillation.divergence": "largest difference of loss, share 0.0"})
class TeacherWithoutTemperature(TorchTrainEngine):
    """The teacher's logits are not divided by its temperature."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        return super().forward_backward(batch.with_meta(teacher_temperature=1.0), objective)


@defect({"distillation.top_tokens": "largest difference of log-probs"})
class TopTokensAtTemperatureOne(TorchTrainEngine):
    """Log-probs of the most probable tokens are those before the temperature."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = super().forward(batch, outputs)
        if "top_log_probs" in outputs:
            found |= super().forward(batch.with_meta(temperature=1.0), ("top_log_probs",))
        return found


@defect({"distillation.top_divergence": "largest difference of"})
class NothingBesideTheTopTokens(TorchTrainEngine):
    """The divergence is summed over the teacher's most probable tokens alone, as if they were all there are."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        if "teacher_top_log_probs" in batch:
            whole = batch["teacher_top_log_probs"].log_softmax(-1)
            batch = batch.with_tokens(teacher_top_log_probs=whole)
        return super().forward_backward(batch, objective)


def early(batch: Batch) -> Batch:
    if "response_mask" not in batch:
        return batch
    return batch.with_tokens(response_mask=batch["response_mask"].roll(-1))


@defect({"outputs.mask": "off the mask", "gradient.mask": "largest difference of loss"})
class MaskOneEarly(TorchTrainEngine):
    """The response mask is applied to the predicting position: off by one."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        return super().forward(early(batch), outputs)

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        return super().forward_backward(early(batch), objective)


@defect({"outputs.row_order": "passes of 2 rows"})
class RowsSorted(TorchTrainEngine):
    """Outputs are in the order in which rows ran: by length."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = super().forward(batch, outputs)
        if self.spec.micro_batch_rows is None or batch.num_rows == 0:
            return found
        at = batch.token_index(batch.lengths.argsort(stable=True))
        return {name: values[at] for name, values in found.items()}


@defect({"outputs.batch_invariance": "list index out of range"})
class NoRowsFail(TorchTrainEngine):
    """A rank without rows raises an error."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        if batch.num_rows == 0:
            raise IndexError("list index out of range")
        return super().forward(batch, outputs)


@defect({"outputs.packing": "most tokens through a linear layer"})
class PadsInSecret(TorchTrainEngine):
    """Claims packing, but runs padded rectangles."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        outputs = self.outputs

        def padded(batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
            found: dict[str, Tensor] = outputs(batch, names, False)
            return found

        self.outputs = OtherPasses(outputs, padded)  # type: ignore[assignment]


@defect({"frozen": "largest difference"})
class FrozenInHalf(TorchTrainEngine):
    """A frozen model is stored in bfloat16, whatever dtype was requested."""

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        super().initialize(ctx, spec)
        if spec.optim is None:
            for parameter in self.parameters.values():
                parameter.data = parameter.data.bfloat16().float()


@defect({"length.outputs": "in one pass"})
class EndsAfterThousand(Wrapped):
    """Outputs are computed only for the first 1,024 tokens of a pass, the size of a buffer."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        early = torch.arange(batch.num_tokens) < 1024
        found = super().run(batch, names)
        return {name: values if name == "scores" else values * early for name, values in found.items()}


@defect({"length.budget": "most tokens in a pass"})
class ForwardWithoutBudget(TorchTrainEngine):
    """Passes without gradient run all rows in one pass."""

    def _cut(self, batch: Batch, objective: Objective | None = None) -> list[Tensor]:
        return (
            [torch.arange(batch.num_rows)] if objective is None and batch.num_rows else super()._cut(batch, objective)
        )


@defect({"length.outputs": "300 tokens"})
class LongRowsCut(TorchTrainEngine):
    """A row that is longer than the limit of a pass is truncated."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found, limit = super().forward(batch, outputs), self.spec.micro_batch_tokens
        seen = batch.position_ids < (limit or 10**9)
        return {name: values if name == "scores" else values * seen for name, values in found.items()}


@defect({"length.shortest": "list index"})
class OneTokenRowsFail(Wrapped):
    """A row of one token raises an error, because it has nothing to predict."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        if batch.num_rows and int(batch.lengths.max()) == 1:
            raise IndexError("list index out of range")
        return super().run(batch, names)


@defect({"length.values": "largest difference of"})
class ValuesMasked(Wrapped):
    """The response mask is applied to values too."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        if "values" in found and "response_mask" in batch:
            found["values"] = found["values"] * batch["response_mask"]
        return found


@defect({"length.scores": "largest difference of scores"})
class ScoresInOrderOfLength(TorchTrainEngine):
    """If rows run in several passes, scores are in the order in which they ran."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found, cut = super().forward(batch, outputs), self._cut(batch)
        return {name: values[torch.cat(cut)] if name == "scores" and cut else values for name, values in found.items()}


@defect({"length.entropy": "largest difference of entropy"})
class EntropyAtOne(Wrapped):
    """If log-probs and entropy are requested together, the entropy is that of temperature 1."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        if len(names) > 1:
            found |= super().run(batch.with_meta(temperature=1.0), ("entropy",))
        return found


@defect({"frozen.heads": "log_probs"})
class FrozenAtOne(TorchTrainEngine):
    """A frozen model ignores the temperature."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        return super().forward(batch.with_meta(temperature=1.0) if self.optim is None else batch, outputs)


@defect({"length.entropy": "not asked for"})
class MoreThanAsked(TorchTrainEngine):
    """Returns log-probs whatever is requested."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        names = outputs if self.spec.model.head is not Head.LM or "log_probs" in outputs else ("log_probs", *outputs)
        return super().forward(batch, names)


class _OtherEntropy(torch.nn.Module):
    """The outputs of an engine, with another computation of the entropy."""

    def __init__(self, outputs):
        super().__init__()
        self.inner = outputs

    def send(self, batch, device):
        return self.inner.send(batch, device)

    def forward(self, batch, names, *, plan=None):
        found = self.inner(batch, names, plan=plan)
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


@defect({"model.vocabulary": "wide"})
class EntropyOfTopTokens(TorchTrainEngine):
    """Entropy is summed over the 128 most probable tokens."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        self.outputs = _LikeliestEntropy(self.outputs)


class _EntropyOfProbabilities(_OtherEntropy):
    def entropy(self, logits):
        chances = logits.softmax(-1)
        return -(chances * chances.log()).sum(-1)


@defect({"outputs.entropy_low_temperature": "entropies that are not finite"})
class EntropyOfProbabilities(TorchTrainEngine):
    """Entropy is computed from probabilities and their logarithms: NaN if a probability underflows in float32."""

    def initialize(self, ctx, spec):
        super().initialize(ctx, spec)
        self.outputs = _EntropyOfProbabilities(self.outputs)


@defect({"length.shortest": "ForwardBackwardResult.loss is a Tensor"})
class LossIsATensor(TorchTrainEngine):
    """Fields of results are tensors."""

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        result = super().forward_backward(batch, objective)
        return replace(result, loss=torch.tensor(result.loss))  # type: ignore[arg-type]


@defect({"length.shortest": "asked for"})
class OutputsWithMore(TorchTrainEngine):
    """Entropy is always returned, requested or not."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        found = super().forward(batch, outputs)
        return found | ({"entropy": torch.zeros(batch.num_tokens)} if "log_probs" in outputs else {})


@defect({"outputs.all_masked": "largest log-prob"})
class MaskedIsAll(TorchTrainEngine):
    """A mask without any token is treated as no mask."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        mask = batch.tokens.get("response_mask")
        if mask is not None and not bool(mask.any()):
            batch = replace(batch, tokens={n: t for n, t in batch.tokens.items() if n != "response_mask"})
        return super().forward(batch, outputs)


@defect({"outputs.unlikely": "largest difference"})
class LogProbsClamped(Wrapped):
    """Log-probs are clamped to at least -15."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        return {n: values.clamp(min=-15.0) if n == "log_probs" else values for n, values in found.items()}


@defect({"outputs.groups": "largest difference"})
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


@defect({"length.many_rows": "largest difference"})
class SmallRowNumbers(Wrapped):
    """Packed rows are distinguished by eight bits."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        found = super().run(batch, names)
        if batch.num_rows > 128 and "scores" not in names:
            late = batch.row_of_token >= 128
            found = {name: torch.where(late, values * 0.9, values) for name, values in found.items()}
        return found


@defect({"read_only.forward": "log_probs"})
class TuplesOnly(TorchTrainEngine):
    """Requested outputs that are given as a list are not recognised."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        return super().forward(batch, outputs) if isinstance(outputs, tuple) else {}


@defect({"outputs.log_probs": "bfloat16"})
class ForwardInHalf(TorchTrainEngine):
    """Outputs without gradient are bfloat16."""

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        return {name: values.bfloat16() for name, values in super().forward(batch, outputs).items()}


@defect({"outputs.unlikely": "at temperature 0.03"})
class ForwardNotSoCold(Wrapped):
    """Passes without gradient use a temperature of at least 0.5."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        temperature = batch.meta.get("temperature", 1.0)
        if not torch.is_grad_enabled() and temperature < 0.5:
            batch = batch.with_meta(temperature=0.5)
        return super().run(batch, names)


@defect({"length.outputs": "largest difference"})
class LastPositionUnread(Wrapped):
    """The last token of a row with as many tokens as the model has positions is cut off."""

    def run(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        most = self.model.config.max_position_embeddings
        cut = batch.position_ids == most - 1
        found = super().run(batch, names)
        return {name: values if name == "scores" else values.masked_fill(cut, 0.0) for name, values in found.items()}


@defect({"length.budget": "passes over their limit"})
class LengthsOfEightBits(TorchTrainEngine):
    """Lengths are cut into passes as numbers of eight bits: a row of 257 tokens counts as one."""

    def _cut(self, batch: Batch, objective: Objective | None = None) -> list[Tensor]:
        return super()._cut(replace(batch, lengths=batch.lengths % 256) if self.spec.micro_batch_tokens else batch)
