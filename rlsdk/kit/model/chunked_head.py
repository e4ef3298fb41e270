"""Computes what is needed of logits, a chunk of tokens at a time, so that memory does not grow with tokens times
vocabulary. Shared by the train engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

OfLogits = Callable[..., tuple[Tensor, ...]]
"""Called with float32 logits `[m, V]` of a chunk of tokens, divided by the temperature, and with the tensors `[m, ...]`
that were given for these tokens. Returns `[m, ...]` tensors, differentiable in the logits; a token's results depend on
its own logits only. `log_probs` is one; another may compare the logits with those of a second model."""
Product = Callable[[Tensor], Tensor]
"""`[m, H]` to `[m, V]`: the product with the weight of a vocabulary."""


class Project(Protocol):
    """Logits, in the dtype of the model, of hidden states."""

    def __call__(self, hidden: Tensor, product: Product | None) -> Tensor:
        """`[m, V]` of `[m, H]`; `product`, where there is one, replaces the multiplication with the weight."""


@dataclass(frozen=True, kw_only=True)
class VocabularyHead:
    """Computes logits from hidden states."""

    weight: Tensor | None
    """`[V, H]`. None: `project` cannot replace its multiplication, and all parameters are in `others`."""
    bias: Tensor | None = None
    """`[V]`."""
    project: Project | None = None
    """None: logits are the product with the weight, plus the bias."""
    others: tuple[Tensor, ...] = ()
    """Other parameters that `project` uses and that have gradients."""
    temperature: float = 1.0
    steady: bool = False
    """Gradients of the head's parameters come in the order of these fields for any number of tokens: one chunk, too, is
    computed again in the backward pass if there are several. For engines that reduce gradients in the order in which
    they come, which must then be that of other ranks, with other numbers of tokens."""

    def logits(self, hidden: Tensor, product: Product | None = None) -> Tensor:
        """`[m, V]` float32, divided by the temperature."""
        if self.project is not None:
            logits = self.project(hidden, product).float()
        elif product is not None:
            logits = product(hidden).float()
        else:
            assert self.weight is not None
            logits = F.linear(hidden, self.weight, self.bias).float()
        return logits if self.temperature == 1.0 else logits / self.temperature


def outputs_of_logits(
    head: VocabularyHead, compute: OfLogits, hidden: Tensor, given: Sequence[Tensor], chunk: int
) -> tuple[Tensor, ...]:
    """Results of `compute` for all tokens, `[M, ...]` each; differentiable in `hidden` and in the head's parameters.

    With gradients and more than one chunk, the logits of each chunk are computed again in the backward pass, and the
    gradient of the weight is added up in float32 and rounded to the weight's dtype once. With `log_probs`, memory
    beside inputs, outputs and gradients is at most four float32 tensors of `chunk` times `V` elements.

    Args:
        head: makes the logits.
        compute: what is computed of them.
        hidden: `[M, H]`.
        given: `[M, ...]` tensors without gradients, such as the targets.
        chunk: number of tokens whose logits are in memory at once (`kit.model.logit_chunks`).
    """
    parameters = (head.weight, head.bias, *head.others)
    steady = head.steady and sum(p is not None and p.requires_grad for p in parameters) > 1
    if torch.is_grad_enabled() and (steady or len(hidden) > chunk):
        outputs: tuple[Tensor, ...] = _Recomputed.apply(head, compute, chunk, len(given), hidden, *given, *parameters)  # type: ignore[no-untyped-call]
        return outputs
    return _in_chunks(head, compute, hidden, given, chunk)


def log_probs(logits: Tensor, targets: Tensor, *, entropy: bool = False) -> tuple[Tensor, ...]:
    """Log-prob of each target `[m]` in nats; with `entropy` also the entropy of each distribution. An `OfLogits`."""
    found: tuple[Tensor, ...] = _LogProbs.apply(logits, targets, entropy)  # type: ignore[no-untyped-call]
    return found


class _LogProbs(torch.autograd.Function):
    """Keeps one tensor of the size of the logits for its gradient, where torch's own operations keep up to four. Equal
    to them bit for bit."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, ...]:
        logs = F.log_softmax(logits, dim=-1)
        ctx.save_for_backward(logs, targets)
        ctx.set_materialize_grads(False)
        chosen = logs.gather(1, targets[:, None])[:, 0]
        return (chosen, -logs.exp().mul_(logs).sum(-1)) if entropy else (chosen,)

    @staticmethod
    def backward(ctx: Any, chosen: Tensor | None, entropy: Tensor | None = None) -> tuple[Tensor, None, None]:
        logs, targets = ctx.saved_tensors
        slope = torch.zeros_like(logs) if entropy is None else _entropy_slope(logs, entropy)
        if chosen is not None:
            slope.scatter_add_(1, targets[:, None], chosen[:, None])
        return torch._log_softmax_backward_data(slope, logs, -1, logs.dtype), None, None


def _entropy_slope(logs: Tensor, entropy: Tensor) -> Tensor:
    """Gradient of the entropy in the log-probs, before that of the softmax."""
    slope, probabilities = logs * -entropy[:, None], logs.exp()
    slope.mul_(probabilities)
    return slope.add_(probabilities.mul_(-entropy[:, None]))


def _in_chunks(
    head: VocabularyHead, compute: OfLogits, hidden: Tensor, given: Sequence[Tensor], chunk: int
) -> tuple[Tensor, ...]:
    parts = [torch.split(tensor, chunk) for tensor in (hidden, *given)]
    found = [compute(head.logits(part), *beside) for part, *beside in zip(*parts, strict=True)]
    return found[0] if len(found) == 1 else tuple(map(torch.cat, zip(*found, strict=True)))


class _Recomputed(torch.autograd.Function):
    """`_in_chunks`, whose backward pass computes each chunk again."""

    @staticmethod
    def forward(
        ctx: Any, head: VocabularyHead, compute: OfLogits, chunk: int, num_given: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.head, ctx.compute, ctx.chunk, ctx.num_given = head, compute, chunk, num_given
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return _in_chunks(head, compute, tensors[0], tensors[1 : num_given + 1], chunk)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Any, ...]:
        hidden, *rest = ctx.saved_tensors
        given, parameters = rest[: ctx.num_given], rest[ctx.num_given :]
        weight, bias, *others = parameters
        sums = _Sums.zeros(parameters)
        product = None if weight is None else lambda x: _Product.apply(x, weight, bias, sums)  # type: ignore[no-untyped-call]
        gradient = torch.empty_like(hidden)
        for at in range(0, len(hidden), ctx.chunk):
            part = slice(at, at + ctx.chunk)
            leaf = hidden[part].detach().requires_grad_()
            with torch.enable_grad():
                found = ctx.compute(ctx.head.logits(leaf, product), *(tensor[part] for tensor in given))
            gradient[part] = sums.add(found, [None if s is None else s[part] for s in slopes], leaf, others)
            del found  # frees the logits of this chunk before those of the next are computed
        return None, None, None, None, gradient, *(None for _ in given), *sums.rounded(parameters)


@dataclass(frozen=True)
class _Sums:
    """Gradients of the head's parameters, added up over chunks."""

    of: list[Tensor | None]
    """Float32: of the weight, of the bias, and of the others. None: no gradient is needed."""

    @classmethod
    def zeros(cls, parameters: Sequence[Tensor | None]) -> _Sums:
        return cls(
            [
                torch.zeros_like(p, dtype=torch.float32) if p is not None and p.requires_grad else None
                for p in parameters
            ]
        )

    def rounded(self, parameters: Sequence[Tensor | None]) -> list[Tensor | None]:
        """In the dtypes of the parameters."""
        pairs = zip(self.of, parameters, strict=True)
        return [None if total is None or p is None else total.to(p.dtype) for total, p in pairs]

    def add(
        self, found: Sequence[Tensor], slopes: Sequence[Tensor | None], leaf: Tensor, others: Sequence[Tensor]
    ) -> Tensor:
        """Runs a chunk backward and adds what it gives to the sums; returns the gradient of its hidden states."""
        used = [(value, slope) for value, slope in zip(found, slopes, strict=True) if slope is not None]
        ask = [leaf, *(p for p in others if p.requires_grad)]
        values, given = zip(*used, strict=True)
        gradient, *rest = torch.autograd.grad(values, ask, given, allow_unused=True)
        totals = (total for total in self.of[2:] if total is not None)
        for total, part in zip(totals, rest, strict=True):
            if part is not None:
                total.add_(part)
        return gradient

    def add_product(self, slope: Tensor, hidden: Tensor) -> None:
        """Adds the gradients of weight and bias, from that of logits `[..., V]` and from hidden states `[..., H]`."""
        weight, bias = self.of[:2]
        slope, hidden = slope.flatten(0, -2), hidden.flatten(0, -2)
        if bias is not None:
            bias.add_(slope.sum(0, dtype=torch.float32))
        if weight is None:
            return
        if slope.dtype is torch.float32:
            weight.addmm_(slope.t(), hidden)
        elif slope.is_cuda:
            torch.addmm(weight, slope.t(), hidden, out_dtype=torch.float32, out=weight)
        else:
            weight.addmm_(slope.t().float(), hidden.float())


class _Product(torch.autograd.Function):
    """A product with the head's weight, whose gradient goes to `_Sums`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, sums: _Sums) -> Tensor:
        ctx.sums = sums
        ctx.save_for_backward(hidden, weight)
        return F.linear(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        hidden, weight = ctx.saved_tensors
        ctx.sums.add_product(slope, hidden)
        return slope @ weight, None, None, None
